"""`make gpu-wheels DEST=FOLDER`: the wheels that a GPU machine may lack, for `make gpu WHEELS=FOLDER`; prints each with its size.

For CPython 3.12 on x86-64 Linux, in the versions of examples/embedded/requirements.txt. SGLang is packed again without what
its capture does not need: binaries, and the files of its benchmarks and tests. torch, numpy, transformers and the like are
taken to be on such a machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

LOCK = Path(__file__).parents[2] / "examples/embedded/requirements.txt"
NAMES = (
    "lz4", "xxhash", "h11", "megatron-core", "sglang",
    # what SGLang 0.5.23 imports on the way to its TopK
    "annotated-types", "apache-tvm-ffi", "cffi", "compressed-tensors", "dill", "gguf", "ipython", "loguru", "msgspec", "orjson",
    "pybase64", "pycparser", "pydantic", "pydantic-core", "python-multipart", "pyzmq", "sniffio", "soundfile", "starlette",
    "torch-memory-saver", "traitlets", "typing-inspection", "zstandard",
)  # fmt: skip
PLATFORMS = ["_2_34", "_2_31", "_2_28", "_2_27", "_2_24", "_2_17", "_2_12", "2014", "1"]
"""Platform tags by glibc, newest first."""
BINARY = (".so", ".cubin", ".a", ".bin", ".png", ".gif", ".jpg", ".mp4", ".wav", ".jsonl")
LIMIT_BYTES = 60_000_000


def main(folder: str) -> int:
    dest = Path(folder)
    dest.mkdir(parents=True, exist_ok=True)
    pins = pinned(LOCK.read_text())
    platforms = [f"--platform=manylinux{name}_x86_64" for name in PLATFORMS]
    target = ["--python-version=3.12", "--implementation=cp", "--only-binary=:all:", *platforms]
    quiet = ["-q", "--disable-pip-version-check", "--no-deps", f"--dest={dest}"]
    wanted = [f"{name}=={pins[name]}" for name in NAMES]
    subprocess.run([sys.executable, "-m", "pip", "download", *quiet, *target, *wanted], check=True)
    repack(next(dest.glob("sglang-*.whl")))
    sizes = {path.name: path.stat().st_size for path in sorted(dest.glob("*.whl"))}
    for name, nbytes in sizes.items():
        print(f"{nbytes / 1e6:7.2f} MB  {name}")
    total = sum(sizes.values())
    print(f"{total / 1e6:7.2f} MB  in all, at most {LIMIT_BYTES / 1e6:.0f}")
    return int(total > LIMIT_BYTES)


def pinned(lock: str) -> dict[str, str]:
    """Name -> version.

    >>> pinned("# what\\nlz4==4.4.5\\nPyZMQ==27.3.0  # why")
    {'lz4': '4.4.5', 'pyzmq': '27.3.0'}
    """
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s#;]+)", lock, flags=re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def repack(wheel: Path) -> None:
    """In place, without binaries."""
    small, packed = wheel.with_suffix(".small"), zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(small, "w", packed, compresslevel=9) as kept:
        for member in whole.infolist():
            if not member.filename.endswith(BINARY):
                kept.writestr(member.filename, whole.read(member))
    small.replace(wheel)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
