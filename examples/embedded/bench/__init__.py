"""The benchmarks that start real engines or trainers: `r3channel bench` runs them in a clone, and no wheel has them.

Each module measures what its name says, in parts (`PARTS`), as the modules of `r3channel.bench` do.
"""

from __future__ import annotations
