"""The real engines on a machine without a GPU: shims for child processes, a tiny model, a server to start.

No wheel has it; four benchmarks of r3channel import it, in a clone. The shims reach child processes through their environment
only (`environment()` in `examples.embedded.sglang`); nothing is written into site-packages.
"""

from __future__ import annotations
