"""The bearer token of direct delivery: where it lies, how it is read, how it is compared. This module knows no protocol."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from r3channel.errors import ConfigError
from r3channel.observe.check import Check, CheckContext

_WELL_FORMED = re.compile(r"[A-Za-z0-9_.~-]{32,512}")
"""At least 32 characters, which are 128 bits in hex."""
_WRITE_LIMIT_S = 2.0
"""Seconds between the creation of a token's file and its content, on a slow shared folder."""


def create_token(path: str | Path) -> str:
    """Write a fresh token of 256 bits into a new file.

    The file's mode is 0600.

    Raises:
        ConfigError: the file exists, or cannot be created.
    """
    token = secrets.token_hex(32)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"token file {path} cannot be created: {error}") from error
    with os.fdopen(handle, "w") as file:
        file.write(token + "\n")
    return token


def token_in_memory() -> str:
    """Write a fresh token to memory and return its path.

    Other processes of this user and machine can read the file. It ends with this process, so that one that is killed leaves no
    token behind. Linux only.
    """
    handle = os.memfd_create("r3channel-token")  # never closed
    os.fchmod(handle, 0o600)
    os.write(handle, secrets.token_hex(32).encode())
    return f"/proc/{os.getpid()}/fd/{handle}"


def obtain_token(path: str | Path) -> str:
    """Read the token in a file, which is created if missing.

    Several processes may ask for one file at once.

    Raises:
        ConfigError: as in `create_token` and `read_token`.
    """
    path = Path(path)
    if not path.exists():
        try:
            return create_token(path)
        except ConfigError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
    deadline_s = time.monotonic() + _WRITE_LIMIT_S
    while path.exists() and not path.stat().st_size and time.monotonic() < deadline_s:
        time.sleep(0.01)  # the process that created it is about to write
    return read_token(path)


def read_token(path: str | Path) -> str:
    """Read the token in a file that nobody else can read.

    Raises:
        ConfigError: the file cannot be read, others could read it, or it holds no token. The token is never in the message.
    """
    try:
        with open(path) as file:
            status = os.fstat(file.fileno())
            text = file.read(1024).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {path} cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise ConfigError(
            f"token file {path} has mode {stat.S_IMODE(status.st_mode):04o}, expected 0600: others could read it"
        )
    if not _WELL_FORMED.fullmatch(text):  # too short, or unfit for a header
        what = f"{len(text)} characters; expected 32 to 512 letters and digits (128 bits or more)"
        raise ConfigError(f"token file {path} holds {what}")
    return text


def check_token(context: CheckContext) -> Iterator[Check]:
    """Check that the token file, where one is named, can be read.

    Only a relay makes a file that is missing.
    """
    if path := context.config.token_file:
        made = context.role in ("relay", "all") and not os.path.exists(path)
        found, fault = f"the relay makes {path} when it starts" if made else f"{path} holds a token", ""
        try:
            if not made:
                read_token(path)
        except ConfigError as error:
            fault = str(error)
        yield Check(
            name="token", ok=not fault, found=fault or found, remedy="copy the relay's file to this node"
        )


def is_authorized(header: str | None, token: str) -> bool:
    """Return whether an Authorization header carries the token.

    The comparison takes the same time wherever the two differ.

    >>> is_authorized("Bearer abc", "abc"), is_authorized("Bearer abd", "abc"), is_authorized(None, "abc")
    (True, False, False)
    """
    return hmac.compare_digest((header or "").encode("utf-8", "surrogateescape"), f"Bearer {token}".encode())
