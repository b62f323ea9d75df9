"""The real engines on a machine without a GPU: shims for child processes, a tiny model, a server to start.

No wheel has it. The shims reach child processes through their environment
only (`environment()` in `examples.embedded.sglang`); nothing is written into site-packages.
"""

from __future__ import annotations
