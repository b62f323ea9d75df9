"""The reverse path: weights from the trainer to the engines, versioned and transactional. README.md beside this has one page.

`r3channel/DESIGN.md` has a line for each file. Nothing is imported here, so that each place loads only what it uses.
"""

from __future__ import annotations
