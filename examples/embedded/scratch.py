"""The temporary folder of a run: gone when the run ends, however it ends. What a killed run left goes when the next one begins.

<temporary folder>/r3demo-x/lock      held while the run's process lives: the kernel lets go of it, whatever ends the process
                           ...        all that its parts put into a temporary folder
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "r3demo-"
_LOCK = "lock"


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder of this process's own, deleted at the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with open(folder / _LOCK, "w") as lock:  # no child inherits it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers() -> list[Path]:
    """Delete the folders of this user's runs whose process is gone; which these were."""
    folders = sorted(Path(tempfile.gettempdir()).glob(PREFIX + "*"))
    return [folder for folder in folders if _is_ours(folder) and _removed(folder)]


def _is_ours(folder: Path) -> bool:
    with suppress(OSError):
        found = folder.lstat()  # not a link: anybody may put one into a shared folder
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _removed(folder: Path) -> bool:
    with suppress(OSError), open(folder / _LOCK, "r+") as lock:  # without a lock it is just being made
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
        return True
    return False
