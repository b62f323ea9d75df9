"""Models of an engine under chaos: their routers' choices are noted (`tests.engine.tapped`), and its schedulers have the shim."""

import os
from pathlib import Path

from tests.chaos import shim
from tests.engine import tapped

__all__ = ["tapped"]
shim.apply("engine")
Path(os.environ["R3CHAOS_FOLDER"], f"scheduler{os.getppid()}").write_text(str(os.getpid()))
