"""Models of an engine under chaos: their routers' choices are noted (`tests.engine.tapped`), and its schedulers have the shim."""

from tests.chaos import shim
from tests.engine import tapped

__all__ = ["tapped"]
shim.apply("engine")
