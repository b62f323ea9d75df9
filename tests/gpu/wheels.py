"""`make gpu-wheels DEST=FOLDER`: the wheels that a GPU machine may lack, for `make gpu WHEELS=FOLDER`; prints each with its size.

In batches FOLDER/1 to FOLDER/3, each of a size that can be carried at once: what the checks of single parts need, what a whole
server needs beside it, and the demo. For CPython 3.12 on x86-64 Linux and a Hopper GPU; `image.txt` lists what such a machine
has. What is not used there is left out: Ray's Java, SGLang's binaries, and 595 of 615 MB of its kernels.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

LOCK = Path(__file__).parents[2] / "examples/embedded/requirements.txt"
PARTS = (
    "lz4", "megatron-core", "sglang",
    # what SGLang 0.5.23 imports on the way to its TopK
    "annotated-types", "apache-tvm-ffi", "cffi", "compressed-tensors", "dill", "gguf", "ipython", "loguru", "msgspec", "orjson",
    "pybase64", "pycparser", "pydantic", "pydantic-core", "python-multipart", "pyzmq", "sniffio", "soundfile", "starlette",
    "torch-memory-saver", "traitlets", "typing-inspection", "zstandard",
)  # fmt: skip
SERVER = (
    "distro", "fastapi", "jsonschema", "jsonschema-specifications", "openai", "opentelemetry-api", "partial-json-parser",
    "referencing", "rpds-py", "setproctitle", "uvicorn",
)  # fmt: skip
RELEASE = {
    "sglang": "0.5.15.post1",
    "sglang-kernel": "0.4.4",
    "transformers": "5.12.1",
    "tokenizers": "0.22.2",
}
"""The engine of slime's image, whose torch such a machine has, and the versions that it pins."""
NAMES = {*PARTS, *SERVER, *RELEASE}
LOOP = ("ray", "mbridge")
PLATFORMS = ["_2_34", "_2_31", "_2_28", "_2_27", "_2_24", "_2_17", "_2_12", "2014", "1"]
"""Platform tags by glibc, newest first."""
BINARY = (".so", ".cubin", ".a", ".bin", ".png", ".gif", ".jpg", ".mp4", ".wav", ".jsonl")
KERNELS = ("sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/spatial_ops.abi3.so")
LIMIT_BYTES = 55_000_000
"""A batch at most."""


def main(folder: str) -> int:
    pins = pinned(LOCK.read_text())
    parts, server, loop = ({name: pins[name] for name in names} for names in (PARTS, SERVER, LOOP))
    batches = enumerate((parts, server | RELEASE, loop), start=1)
    return max([batch(Path(folder, str(number)), wanted) for number, wanted in batches])


def batch(dest: Path, wanted: Mapping[str, str]) -> int:
    """Fill the folder; 1 where it is too large."""
    dest.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux{name}_x86_64" for name in PLATFORMS]
    target = ["--python-version=3.12", "--implementation=cp", "--only-binary=:all:", *platforms]
    quiet = ["-q", "--disable-pip-version-check", "--no-deps", f"--dest={dest}"]
    exact = [f"{name}=={version}" for name, version in wanted.items()]
    subprocess.run([sys.executable, "-m", "pip", "download", *quiet, *target, *exact], check=True)
    for name, dropped in {"sglang*.whl": BINARY, "ray-*.whl": (".jar", ".map")}.items():
        for wheel in dest.glob(name):
            repack(wheel, dropped)
    sizes = {path.name: path.stat().st_size for path in sorted(dest.glob("*.whl"))}
    for name, nbytes in sizes.items():
        print(f"{nbytes / 1e6:7.2f} MB  {name}")
    total = sum(sizes.values())
    print(f"{total / 1e6:7.2f} MB  in {dest}, at most {LIMIT_BYTES / 1e6:.0f}")
    return int(total > LIMIT_BYTES)


def pinned(lock: str) -> dict[str, str]:
    """Name -> version.

    >>> pinned("# what\\nlz4==4.4.5\\nPyZMQ==27.3.0  # why")
    {'lz4': '4.4.5', 'pyzmq': '27.3.0'}
    """
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s#;]+)", lock, flags=re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def repack(wheel: Path, dropped: tuple[str, ...]) -> None:
    """In place, without files that end so, but for a Hopper's kernels."""
    small, packed = wheel.with_suffix(".small"), zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(small, "w", packed, compresslevel=9) as kept:
        for member in whole.infolist():
            if not member.filename.endswith(dropped) or member.filename in KERNELS:
                kept.writestr(member.filename, whole.read(member))
    small.replace(wheel)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
