"""One reply of a sample, waiting for its frame or for the turn before it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from r3channel.errors import R3Error, ReceiptInvalid, RoutingError, StoreFull
from r3channel.relay.arrival import Arrived
from r3channel.relay.engines import EngineRegistry
from r3channel.routing import Ids
from r3channel.wire.receipt import Receipt


@dataclass
class Awaited:
    """Ends with `arrived` or with `error`."""

    sample_id: str
    tokens: Ids
    """int32, its own: until its frame is here the caller goes on with the list."""
    engine: str
    key: int | None
    """What the frame of this reply's request carries; None when the reply does not name its request."""
    adds_turn: bool
    receipt: Receipt | None
    since_s: float = field(default_factory=time.monotonic)
    arrived: Arrived | None = None
    error: R3Error | None = None
    full: StoreFull | None = None
    """Why it waits although its frame is here."""

    @property
    def settled(self) -> bool:
        return self.arrived is not None or self.error is not None

    @property
    def where(self) -> str:
        """For errors."""
        return f"sample {self.sample_id} from engine {self.engine}"

    def give(self, frame: Arrived | RoutingError) -> None:
        """What came for the receipt."""
        if isinstance(frame, RoutingError):
            self.error = type(frame)(f"sample {self.sample_id}: {frame}")
        else:
            self.arrived = frame

    def check_receipt(self, receipt: Receipt) -> None:
        if self.key is not None and receipt.sample_key != self.key:
            raise ReceiptInvalid(
                f"{self.where}: the receipt is for request key {receipt.sample_key:#x}, the reply for {self.key:#x}; were "
                "replies swapped?"
            )

    def describe(self, engines: EngineRegistry) -> str:
        """The frame that has not come, and what is known about its engine."""
        receipt = self.receipt
        assert receipt is not None
        where = f"{self.where}, frame {receipt.serial}, rows {receipt.first_row}.."
        where += str(receipt.first_row + receipt.rows)
        if engines.knows(receipt.boot_id):
            return f"{where}: not delivered; the engine's log says why it gave up"
        refused = engines.reports().get(engines.name_of(receipt.boot_id), "it never said hello to this relay")
        return f"{where}: {refused}; are R3CHANNEL_RELAY_URL and R3CHANNEL_TOKEN_FILE this relay's?"
