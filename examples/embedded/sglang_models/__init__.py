"""SGLang's own model classes that the embedded mode serves, and no others.

SGLANG_EXTERNAL_MODEL_PACKAGE names this package, so that SGLang 0.5.23 defers importing its ~200 model files
(`models/registry.py`, "Defer default model imports"). A model that is not here is still found, only later.
"""

from __future__ import annotations
