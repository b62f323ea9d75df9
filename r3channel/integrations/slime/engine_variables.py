"""Variables that an engine's process needs. No secret is among them, because frameworks log, pickle and send all that they
hold.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from r3channel.errors import ConfigError
from r3channel.integrations.preflight import LOOPBACK
from r3channel.transport.auth import token_in_memory
from r3channel.transport.network import AUTO


def engine_variables(relay: Any, args: Namespace, *, nodes: int) -> dict[str, str]:
    """Return the plug-in's environment variables for engines.

    With direct delivery the call opens the relay's ingest. If the relay serves /metrics, engines serve them too, each at a port
    that is free on its machine. The token's path is among the variables, and every process reads the file itself. Without
    `--r3-token-file` that file is in this process's memory, where no other machine can read it.

    Args:
        relay: The relay that engines deliver to.
        args: Prepared arguments.
        nodes: Number of machines of the job.

    Raises:
        ConfigError: For direct delivery on several machines without `--r3-token-file`.
    """
    channel, page, given = args.r3_channel, relay.config, args.r3_channel["interface"]
    found = {
        "R3CHANNEL_ENGINE": "1", "R3CHANNEL_INTERFACE": page.interface if given in (LOOPBACK, AUTO) else given,
        "R3CHANNEL_METRICS_PORT": str(min(page.metrics_port, 0)), "R3CHANNEL_METRICS_DIR": page.metrics_dir,
        "R3CHANNEL_RUN_NAME": page.run_name, "R3CHANNEL_TRACE": channel["trace"],
    }  # fmt: skip
    if args.r3_delivery != "direct":
        return found
    path = channel["token_file"]
    if not path and nodes > 1:
        text = f"--r3-delivery direct on {nodes} nodes without --r3-token-file: engines on the other nodes could not read the "
        text += "token; expected the path of a file, mode 0600, that every node can read (it is made if it is missing)"
        raise ConfigError(text)
    path = path or token_in_memory()
    direct = {"R3CHANNEL_DELIVERY": "direct", "R3CHANNEL_RELAY_URL": relay.serve(token_file=path)}
    return found | direct | {"R3CHANNEL_TOKEN_FILE": path}
