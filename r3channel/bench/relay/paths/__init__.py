"""The paths by name. A path's module is imported in the processes that run it."""

from __future__ import annotations

OURS = ("r3channel",)
STORE = ("slime_torch_int32", "ray_numpy_int32", "ray_numpy_uint8")
"""Through Ray's object store, from one raylet to another."""
DIRECT = ("ray_direct_gloo_uint8",)
LIMIT = ("raw_gloo",)

PEERS = (*STORE, *DIRECT)
"""What ours is compared to: peers between two nodes."""
ALL = (*OURS, *PEERS, *LIMIT)
