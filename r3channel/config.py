"""Values that a user may set, checked on load. One rule: file < environment `R3CHANNEL_*` < flags.

Other modules receive values; only this one reads the environment or a file. Importing it imports no other room, so the
flag can be offered to a parser while the channel is off.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from r3channel.errors import ConfigError, nearest
from r3channel.transport.select import TRANSPORTS

ENV_PREFIX = "R3CHANNEL_"
_MIB = 1 << 20
_LAST_PORT = 65535
_LEAVE_LIVE = ("on_missing", "on_lost", "on_changed")
_CHOICES: dict[str, tuple[str, ...]] = {
    "invalid_rows": ("error", "live", "mask"), **dict.fromkeys(_LEAVE_LIVE, ("error", "live")),
    "on_stale": ("accept", "mask", "reject"),
}  # fmt: skip
_BOUNDS = {
    "max_live": (0, 1, "a share of rows, 0 to 1"), "max_staleness": (-1, math.inf, "-1 (no bound) or more"),
    "audit_microbatches": (0, math.inf, "0 or more"), "expected_shard_bytes": (0, math.inf, "0 (not known) or more"),
    "bucket_bytes": (1024, math.inf, "at least 1024"), "store_bytes": (64 * _MIB, math.inf, f"at least {64 * _MIB} bytes"),
    "device": (0, math.inf, "0 or more"), "metrics_port": (-1, _LAST_PORT, f"-1..{_LAST_PORT}"),
    "ingest_port": (0, _LAST_PORT, f"0..{_LAST_PORT}"),
}  # fmt: skip
"""Least and most of a value, and the words for them in errors. `_POSITIVE` names values that must be positive and finite."""
_POSITIVE = (
    "join_timeout_s", "send_timeout_s", "step_timeout_s", "expiry_s", "backpressure_timeout_s", "frame_timeout_s",
    "unclaimed_timeout_s", "max_group_failures", "queue_bytes", "deliver_timeout_s",
)  # fmt: skip

REFUSALS = {
    "speculative": "accepted tokens of a tree of drafts are moved without their ids, and not every algorithm hands on the ids of "
    "a pass that verifies; taken are EAGLE, EAGLE3 and STANDALONE with --speculative-eagle-topk 1 (0.5.15.post1, 0.5.23)",
    "disaggregation": "nothing carries the prefill engine's rows to decode; join both engines' rows with "
    "r3channel.relay.pd_merge.merged_frame and set R3CHANNEL_ALLOW=disaggregation",
    "pp": "each stage holds the ids of its own layers only, and none hands them on (0.5.15.post1, 0.5.23)",
    "external_cache": "slots are reloaded without their ids, so old rows would pass for new (0.5.15.post1, 0.5.23)",
    "two_batch_overlap": "each half of a batch writes its ids from the buffer's first row on, so the second half's rows pass "
    "for the first's",
    "pdmux": "decode passes run between the layers of a prefill and write their ids over the prefill's first rows",
    "a2a": "each rank of an attention group routes a part of the tokens, and this SGLang's capture does not gather them, so rows "
    "of other tokens would pass for the rest",
    "prefill_cp": "each rank routes its share of a prompt, in an order of its own, and its rows are read as the prompt's first",
    "swa_replay": "not every layer computes every row of a prompt, so rows of an earlier pass would pass for them",
    "kernel_routing": "the router's choices stay inside a kernel, or it never reports them, so its rows would be all zero",
    "routers": "the engine's routers are not where the checkpoint's configuration says; SGLang's class for this model may ignore "
    "dense layers",
    "unread": "these settings were neither tested nor read, so what they do to rows is not known",
}
"""Words of R3CHANNEL_ALLOW: what an engine is refused for at start, and why its rows may be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelConfig:
    """Relay and trainer side of the channel."""

    transport: str = "tcp"
    """How rows travel from relay to trainers: `tcp`, to a trainer's GPU bucket by bucket; `nccl`, from a GPU of the relay that no
    trainer uses; `gloo`, its stand-in in tests. Control messages go over TCP in any case."""
    bucket_bytes: int = 8 * _MIB
    """Largest slice of a receiver's rows that is sent, staged and placed at once; over `nccl` two are under way."""
    expected_shard_bytes: int = 0
    """What a trainer rank receives per step at most (`r3channel plan` says it). Memory for two such shards, the one in use and
    the next, is made when it joins, where the routers are. A larger step makes more when it comes; 0: every one may."""
    fallback: str = "tcp"
    """How a step travels once a receiver's process group failed `max_group_failures` times: `tcp`, or empty for not at all."""
    max_group_failures: int = 3
    """Connections with a process group that a receiver may use up for one step before it falls back, or fails; and how often its
    rows may come damaged."""
    device: int = 0
    """CUDA device of the relay, with `nccl`, counted within CUDA_VISIBLE_DEVICES (a Ray actor's own GPUs: `num_gpus`). Never one
    that an engine uses in the same process."""
    interface: str = "127.0.0.1"
    """What the relay's ports and every process's /metrics bind on their machine: an address, a network device's name, a network
    (10.0.0.0/8), or `auto`, the address on the route to the relay. Anything but loopback is plaintext: keep it on a private
    network."""
    journal: str = ""
    """Folder in which a copy of all rows survives a relay that is killed (`Relay.recover`); empty: none is written."""
    store_bytes: int = 16384 * _MIB
    """Ceiling of the rows that the relay holds in memory: of samples that wait for a step, and of steps not yet delivered."""
    backpressure_timeout_s: float = 30.0
    """How long `Relay.add` waits, at the ceiling of the frame store, for samples to be delivered or discarded."""
    join_timeout_s: float = 120.0
    """How long a trainer waits for a connection to its relay, and for their process group."""
    send_timeout_s: float = 60.0
    """One bucket on the wire, and the next word of a peer."""
    step_timeout_s: float = 300.0
    """A trainer's whole `receive`, attempts and joins included; and the join with the previous step's send."""
    expiry_s: float = 3600.0
    """Frames that no assignment names are dropped this long after they arrived, and counted."""
    unclaimed_timeout_s: float = 600.0
    """A directly delivered frame waits this long for its reply, as a tool may run before `Relay.add`; then it is dropped."""
    metrics_port: int = -1
    """-1: no /metrics; 0: a free port, which log and the relay's /targets name; else this port for the relay, this + 1 + r for
    trainer rank r, and this + its replica for an engine, whose environment is its own; those that slime starts take free ones."""
    metrics_dir: str = ""
    """Folder in which each process that serves /metrics leaves a file for Prometheus's file_sd_configs."""
    run_name: str = ""
    """Label `run` of every metric, to tell training runs apart; give relay, trainers and engines the same."""
    trace: str = ""
    """Folder into which each process appends its spans, about 100 bytes each, for `r3channel report`; empty: nowhere."""
    invalid_rows: str = "error"
    """Rows that the engine could not record: `error` refuses the sample, `live` lets the live router choose for them, `mask`
    also takes those tokens out of the loss."""
    on_missing: str = "error"
    """A reply without routing: `error` refuses it by name, `live` leaves its rows to the live router and counts the sample. In
    slime also one whose routing cannot be used."""
    on_lost: str = "error"
    """A directly delivered frame that never came, as when its engine was killed: `error` refuses the step by sample, `live`
    leaves its rows to the live router."""
    on_changed: str = "error"
    """In slime, a sample with other tokens than its last reply had, as when a tool spoke last: `error` refuses the step by
    sample, `live` leaves the rows behind that reply to the live router; all of a sample whose earlier tokens changed."""
    max_live: float = 0.1
    """Share of a step's rows that these three may leave to the live router; above it the step is refused."""
    max_staleness: int = -1
    """Committed weight updates that may lie between a row and the trainer; -1: any number. `on_stale` says what then."""
    on_stale: str = "accept"
    """Rows beyond `max_staleness`: `accept` counts them, `mask` takes their tokens out of the loss, `reject` refuses the step."""
    token_tensors: str = ""
    """What else each token brings, by name, with commas (`r3channel/wire/README.md`): `sampling_masks` carries the token ids that
    sampling could choose, beside the routing and not in JSON. For relay and engines. Not with `journal`: a kill loses them."""
    audit_microbatches: int = 1
    """Micro-batches per step whose replayed ids are compared with what the live router would choose; 0: none."""

    ingest_port: int = 0
    """Port of the relay's ingest (`Relay.serve`), which takes frames that engines deliver directly; 0: a free one."""
    token_file: str = ""
    """File, mode 0600, that holds the bearer token of direct delivery; both ends read it."""
    frame_timeout_s: float = 30.0
    """How long `seal` waits for frames whose frame references came; what is missing then is named. Three seconds for those of an
    engine whose connection has ended."""

    def __post_init__(self) -> None:
        direct = ("", *(name for name, kind in TRANSPORTS.items() if kind.join is None))
        choices = {"transport": tuple(TRANSPORTS), "fallback": direct, **_CHOICES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} {getattr(self, name)!r}, expected one of {allowed}")
        if self.token_tensors and self.journal:
            raise ConfigError(
                "token_tensors with journal: they do not survive a relay that is killed; drop one of the two"
            )
        _check_bounds(self)

    @property
    def grouped(self) -> bool:
        """Return whether rows travel over process groups.

        Each is a process group of the relay and one receiver.
        """
        return TRANSPORTS[self.transport].join is not None

    @property
    def policy(self) -> str:
        """Return what trainers do with rows without routing.

        The policy is that of `invalid_rows`, or `live` where `on_missing` or its like says so.
        """
        left = "live" in (getattr(self, name) for name in _LEAVE_LIVE)
        return "live" if self.invalid_rows == "error" and left else self.invalid_rows

    @classmethod
    def load(
        cls, *, flags: Mapping[str, Any] | None = None, file: str | Path | None = None,
        environment: Mapping[str, str] | None = None, **otherwise: Any,
    ) -> ChannelConfig:  # fmt: skip
        """Merge a TOML file, the environment and flags; later ones win.

        Args:
            flags: Values by name; None means unset.
            file: A TOML file.
            environment: The variables; those of this process without it.
            otherwise: Values in the place of this class's defaults, for what none of the three says.

        Raises:
            ConfigError: A name in the file, the flags or the `R3CHANNEL_*` variables is unknown, or a value cannot be used.
        """
        return cls(**otherwise | load_values(cls, flags=flags, file=file, environment=environment))

    @classmethod
    def from_args(cls, args: argparse.Namespace, **otherwise: Any) -> ChannelConfig:
        """Load a config from a namespace that `add_arguments` filled.

        `otherwise` is as in `load`.
        """
        flags = {f.name: getattr(args, f"r3_{f.name}", None) for f in fields(cls)}
        return cls.load(flags=flags, file=getattr(args, "r3_config", None), **otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine side, read from the engine process's environment: SGLang's own parser does not take our flags."""

    engine: bool = False
    """R3CHANNEL_ENGINE=1 turns the plug-in on. Off means nothing is imported or patched."""
    weights: bool = False
    """R3CHANNEL_WEIGHTS=1 turns on the receiving half of weight updates alone; R3CHANNEL_ENGINE=1 has it too."""
    codec: str = "auto"
    """How ids are written: `auto`, `stored`, `lz4`, `packed9` or `set`, which drops the order of a row and
    needs direct delivery."""
    delivery: str = "inband"
    """`inband`: the frame is in the reply. `direct`: it goes to the relay's ingest and the reply holds a frame reference."""
    relay_url: str = ""
    """Where direct frames go: what `Relay.serve` returned."""
    token_file: str = ""
    """As the relay's."""
    queue_bytes: int = 256 * _MIB
    """Ceiling of frames that wait to be sent; a request that would exceed it is answered in-band."""
    deliver_timeout_s: float = 60.0
    """How long a frame is offered to the relay before it is given up; the relay then names it when it seals."""
    kept_bytes: int = 1024 * _MIB
    """Ceiling of rows that retracted requests keep; what exceeds it has the rows, version and kind of the later prefill."""
    name: str = ""
    """What the engine calls itself in its hello; its own address by default."""
    metrics_port: int = -1
    """As the channel's; an engine that replies from several processes adds their number."""
    metrics_dir: str = ""
    """As the channel's: where a file tells Prometheus of the page."""
    run_name: str = ""
    """As the channel's: label `run` of every metric."""
    trace: str = ""
    """As the channel's: where its spans go."""
    interface: str = "127.0.0.1"
    """As the channel's, for the page; `auto` is on the route to `relay_url`."""
    token_tensors: str = ""
    """As the relay's, in the same order; both ends must have them."""
    allow: str = ""
    """Refusals at start to override, by word, with commas (`r3channel/engine/README.md`). Rows may be wrong without a sign."""

    def __post_init__(self) -> None:
        if self.delivery not in ("inband", "direct"):
            raise ConfigError(f"R3CHANNEL_DELIVERY is {self.delivery!r}, expected inband or direct")
        if self.delivery == "direct" and not (self.relay_url and self.token_file):
            raise ConfigError(
                "R3CHANNEL_DELIVERY=direct needs R3CHANNEL_RELAY_URL (what Relay.serve returned) and R3CHANNEL_TOKEN_FILE"
            )
        _check_bounds(self)
        unknown = self.allowed - set(REFUSALS)
        if unknown:
            raise ConfigError(f"R3CHANNEL_ALLOW names {sorted(unknown)}, expected some of {sorted(REFUSALS)}")

    @property
    def allowed(self) -> frozenset[str]:
        return frozenset(word.strip() for word in self.allow.split(",") if word.strip())

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> EngineConfig:
        return cls(**load_values(cls, environment=environment))


def _check_bounds(config: ChannelConfig | EngineConfig) -> None:
    for name, (least, most, expected) in _BOUNDS.items():
        value = getattr(config, name, least)
        if not least <= value <= most:
            raise ConfigError(f"{name} {value}, expected {expected}")
    for name in _POSITIVE:
        value = getattr(config, name, 1)
        if not 0 < value < math.inf:  # a deadline of nan or inf would never end
            raise ConfigError(f"{name} is {value}, expected a positive, finite number")


def load_values(
    cls: type[Any], *, flags: Mapping[str, Any] | None = None, file: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return every value that is set somewhere, by name.

    Later origins win, in the order file, environment, flags. A variable of either class may be set.

    Args:
        cls: The class whose fields are the names.
        flags: Values by name; None means unset.
        file: A TOML file.
        environment: The variables; those of this process without it.

    Raises:
        ConfigError: A name is unknown, the file cannot be read, or a value has another type.
    """
    environment = os.environ if environment is None else environment
    _refuse_unknown(environment)
    kinds, merged = {f.name: type(f.default) for f in fields(cls)}, dict[str, Any]()
    if file:
        for name, value in _read_toml(file).items():
            if name not in kinds:
                raise ConfigError(f"{file}: unknown name {name!r}, expected one of {sorted(kinds)}")
            merged[name] = _convert(f"{file}: {name}", value, kinds[name])
    for name, kind in kinds.items():
        key = ENV_PREFIX + name.upper()
        if key in environment:
            merged[name] = _convert(key, environment[key], kind)
    for name, value in (flags or {}).items():
        if name not in kinds:
            raise ConfigError(f"unknown flag {name!r}, expected one of {sorted(kinds)}")
        if value is not None:
            merged[name] = _convert(name, value, kinds[name])
    return merged


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    known = {ENV_PREFIX + f.name.upper() for cls in (ChannelConfig, EngineConfig) for f in fields(cls)}
    names = {key for key in environment if key.startswith(ENV_PREFIX)}
    said = [f"{one} is no variable of r3channel{nearest(one, known, 0.85)}" for one in names - known]
    if said:  # a mistyped variable would leave a default in place, and nobody would know
        raise ConfigError(". ".join(sorted(said)))


def _read_toml(file: str | Path) -> dict[str, Any]:
    import tomllib  # a tenth of this module's import time, and few users give a file

    try:
        return tomllib.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: expected a readable TOML file of channel options: {error}") from error


def _convert(name: str, value: Any, kind: type[Any]) -> Any:
    if kind is bool and isinstance(value, str):
        if value.lower() not in ("0", "1", "true", "false", ""):
            raise ConfigError(f"{name}={value!r}, expected 0 or 1")
        return value.lower() in ("1", "true")
    if isinstance(value, str) and kind in (int, float):
        try:
            return kind(value)
        except ValueError as error:
            raise ConfigError(f"{name}={value!r}, expected {_KINDS[kind]}") from error
    # A TOML value has a type of its own: 4096.7 is no number of bytes, and True is none either.
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) is not kind:
        raise ConfigError(f"{name}={value!r}, expected {_KINDS[kind]}")
    return value


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--use-r3-channel` and the channel's options to a slime-style parser.

    Nothing is imported for it.
    """
    group = parser.add_argument_group("r3channel")
    group.add_argument("--use-r3-channel", action="store_true", help="carry rollout routing over r3channel")
    group.add_argument("--r3-config", metavar="FILE", help="TOML file with the options below")
    for f in fields(ChannelConfig):
        name = f"--r3-{f.name.replace('_', '-')}"
        text = field_texts(ChannelConfig).get(f.name, "").replace("%", "%%")
        kind, told = type(f.default), f"{text} Default {f.default!r}.".lstrip()
        group.add_argument(name, type=kind, metavar=kind.__name__.upper(), help=told)
    return parser


@functools.cache
def field_texts(cls: type[Any]) -> dict[str, str]:
    """Return the text under each field in the source.

    `--help` and the code then say the same. The dict is empty where no source is kept.
    """
    try:
        (body,) = ast.parse(inspect.getsource(cls)).body
    except OSError:
        return {}
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said)))):
                texts[name] = " ".join(said.split())
    return texts
