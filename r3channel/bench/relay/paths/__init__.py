"""The paths by name. A path's module is imported in the processes that run it."""

from __future__ import annotations

OURS = ("r3channel",)
STORE = ("slime_torch_int32", "ray_numpy_int32", "ray_numpy_uint8")
"""Through Ray's object store, from one raylet to another."""
ONE_RAYLET = ("ray_numpy_int32_one_raylet", "ray_numpy_uint8_one_raylet")
"""The same where both ends share memory, which a rollout node and a trainer node do not."""
DIRECT = ("ray_direct_gloo_uint8",)
STRAW = ("straw_int32", "straw_uint8")
LIMIT = ("raw_gloo",)

PEERS = (*STORE, *DIRECT, *STRAW)
"""What ours is compared to: peers between two nodes. straw stands here with its files in shared memory, its best case."""
ALL = (*OURS, *PEERS, *ONE_RAYLET, *LIMIT)
