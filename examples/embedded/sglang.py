"""A real SGLang HTTP server, on a CPU or the last GPU, as a child process: its environment, its start, its end.

Read against SGLang 0.5.23. Knows nothing about routing; whether the r3channel plug-in is on is one environment variable.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from r3channel.errors import ConfigError, EngineUnavailable, UsageError
from r3channel.transport.network import urlopen

if TYPE_CHECKING:
    import psutil

_SHIMS = Path(__file__).with_name("shims")
_PACKAGE_PARENT = Path(__file__).absolute().parents[2]
_STARTS = 3  # a free port can be taken by another process before the server binds it
_POLL_S, _END_POLL_S = 0.2, 0.02
_LOADS = re.compile(r"/dev/shm/sglang_loads_\S+")
_LOG_TAIL_BYTES = 4000


def environment(
    base: Mapping[str, str] | None = None,
    *,
    r3channel: bool = False,
    codec: str | None = None,
    device: str = "cpu",
) -> dict[str, str]:
    """Environment of a child process that runs SGLang (or imports transformers), without a GPU unless `device` is `cuda`.

    `base` is the environment to start from, this process's by default. `r3channel` turns the capture plug-in on,
    `codec` is its option. Idempotent: applying it to its own result changes nothing.
    """
    env, shims = dict(os.environ if base is None else base), list[str]()
    if device == "cpu":
        env.update(R3DEMO_EMBEDDED="1", SGLANG_USE_CPU_ENGINE="1")
        shims.append(str(_SHIMS))
    env["PYTHONPATH"] = _joined_path(*shims, str(_PACKAGE_PARENT), env.get("PYTHONPATH", ""))
    env["R3CHANNEL_ENGINE"] = "1" if r3channel else "0"
    if codec is not None:
        env["R3CHANNEL_CODEC"] = codec
    for name, value in (_QUIET | _OF_DEVICE[device]).items():
        env.setdefault(name, value)
    return env


_QUIET = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health answers at once instead of generating for 1 s
    "OMP_NUM_THREADS": "1",  # the model is tiny and the cores are shared with trainers
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
_OF_DEVICE = {
    # not all model files: seconds of imports
    "cpu": {"SGLANG_EXTERNAL_MODEL_PACKAGE": "examples.embedded.sglang_models"},
    "cuda": {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"},  # nothing of it is asked for
}
_BACKENDS = {
    "cpu": ["--attention-backend", "torch_native", "--disable-cuda-graph"],
    "cuda": [
        "--attention-backend", "triton", "--sampling-backend", "pytorch", "--moe-runner-backend", "triton",
        "--disable-custom-all-reduce", "--cuda-graph-backend-prefill", "disabled",
    ],
}  # fmt: skip


def _joined_path(*entries: str) -> str:
    parts = [part for entry in entries for part in entry.split(os.pathsep) if part]
    return os.pathsep.join(dict.fromkeys(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a server is started with. Everything else stays SGLang's default."""

    model: str | os.PathLike[str]
    """Folder of the checkpoint."""
    r3channel: bool = True
    """Load the capture plug-in, so that replies carry frames."""
    capture: bool = True
    """--enable-return-routed-experts."""
    codec: str | None = None
    dtype: str = "float32"
    max_total_tokens: int = 16384
    max_running_requests: int = 32
    chunked_prefill_size: int = 1024
    tp: int = 1
    """Ranks that share each request, each on a core of its own while there are as many."""
    random_seed: int = 0
    weight_version: str = "0"
    overlap: bool = True
    """The overlap scheduler; with it the ids leave the forward pass asynchronously."""
    device: str = "cpu"
    """`cuda`: on the last GPUs, by kernels that need no flashinfer, with graphs of decode passes alone."""
    host: str = "127.0.0.1"
    """The address that it binds."""
    before: Sequence[str] = ()
    """What its command line begins with."""
    extra_args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the child's environment last."""

    def arguments(self, *, port: int) -> list[str]:
        """SGLang's command line."""
        arguments = ["--model-path", os.fspath(self.model), "--host", self.host, "--port", str(port)]
        arguments += ["--device", self.device, "--grammar-backend", "none", *_BACKENDS[self.device]]
        arguments += ["--skip-server-warmup", "--log-level", "warning"]
        arguments += ["--sleep-on-idle"]  # an idle scheduler would keep one core busy
        arguments += ["--dtype", self.dtype, "--max-total-tokens", str(self.max_total_tokens)]
        arguments += ["--max-running-requests", str(self.max_running_requests)]
        arguments += ["--chunked-prefill-size", str(self.chunked_prefill_size)]
        arguments += ["--random-seed", str(self.random_seed), "--weight-version", self.weight_version]
        arguments += ["--tp-size", str(self.tp)] if self.tp > 1 else []
        arguments += ["--base-gpu-id", str(_gpus() - self.tp)] if self.device == "cuda" else []
        arguments += ["--enable-return-routed-experts"] if self.capture else []
        arguments += [] if self.overlap else ["--disable-overlap-schedule"]
        return [*arguments, *self.extra_args]

    def environment(self) -> dict[str, str]:
        env = environment(r3channel=self.r3channel, codec=self.codec, device=self.device)
        if self.device == "cuda":
            env["SGLANG_GRPC_PORT"] = str(free_port())  # 0.5.15.post1 counts 10,000 on, which may be no port
        elif self.tp > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of_ranks(self.tp)
        env.update(self.env)
        env["R3DEMO_PARENT_PID"] = str(os.getpid())
        env["PYTHONSAFEPATH"] = "1"  # a file in the working directory must not shadow a package
        return env


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def cores_of_ranks(ranks: int) -> str:
    """SGLang binds CPU ranks to cores by NUMA nodes, of which a small machine has one, unless it is told."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))


class EngineServer:
    """One server. NEW -> STARTING (`start`) -> READY (`wait_ready`) -> CLOSED (`close`, any number of times).

    As a context manager it starts on entry without waiting. The server also ends when this process does.
    One thread uses an instance at a time.
    """

    def __init__(self, options: EngineOptions, *, log_path: str | os.PathLike[str] | None = None) -> None:
        """`log_path` receives everything the server prints; a temporary file by default, removed by `close`."""
        if not Path(options.model, "config.json").is_file():
            raise ConfigError(f"{os.fspath(options.model)} holds no config.json; is it a checkpoint folder?")
        self.options = options
        self._temporary_log = log_path is None
        self.log_path = Path(_new_log() if log_path is None else log_path)
        self._child: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._starts = 0
        self._started_s = 0.0
        self._closed = False

    def start(self) -> EngineServer:
        """Start the server and return at once."""
        if self._child is not None or self._closed:
            raise UsageError("EngineServer.start() was called twice or after close()")
        self._started_s = time.monotonic()
        self._spawn()
        return self

    def wait_ready(self, timeout_s: float = 180.0) -> float:
        """Return the seconds since `start` once the server answers.

        Raises EngineUnavailable, with the end of the log, when it ends first or is not ready within `timeout_s`; the server
        is then closed.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self.is_ready():
            if time.monotonic() > deadline_s:
                self._give_up(f"was not ready within {timeout_s:g} s")
            time.sleep(_POLL_S)
        return time.monotonic() - self._started_s

    def is_ready(self) -> bool:
        """Whether it answers now. Raises EngineUnavailable, as `wait_ready` does, when it has ended."""
        if self._answers():
            return True
        if self._running().poll() is not None and not self._retry_other_port():
            self._give_up(f"ended with exit code {self._running().returncode} before it was ready")
        return False

    @property
    def url(self) -> str:
        """Base address. Final once `wait_ready` has returned: a port that was taken meanwhile is replaced."""
        return f"http://{self.options.host}:{self._port}"

    @property
    def pid(self) -> int:
        return self._running().pid

    def log_tail(self) -> str:
        """The end of what the server printed, oldest first."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")
        return ""

    def close(self) -> None:
        """End the server and all its children, by process id, and wait until they are gone."""
        self._closed = True
        if self._child is not None:
            kill_family(self._child)
        if self._temporary_log:
            self.log_path.unlink(missing_ok=True)

    def __enter__(self) -> EngineServer:
        return self if self._child is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise UsageError("the engine server was not started; call start() first")
        return self._child

    def _spawn(self) -> None:
        self._starts += 1
        self._port = free_port()
        command = [*self.options.before, sys.executable, "-m", "examples.embedded.sglang_main"]
        command += self.options.arguments(port=self._port)
        with self.log_path.open("ab") as log:
            self._child = _popen(command, env=self.options.environment(), log=log)

    def _answers(self) -> bool:
        if self._running().poll() is not None:
            return False
        # containers with GPUs may not tell, nor is what listens on another node told here
        told = self.options.device == "cpu" and not self.options.before
        if told and not listens(self.pid, self._port):
            return False
        try:
            with urlopen(self.url + "/health", timeout_s=2) as reply:
                return reply.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def _retry_other_port(self) -> bool:
        # With DP attention SGLang takes a row of ports beside the server's.
        if self._starts >= _STARTS or "already in use" not in self.log_tail().lower():
            return False
        kill_family(self._running())
        self._spawn()
        return True

    def _give_up(self, what: str) -> None:
        tail = self.log_tail()
        self.close()
        raise EngineUnavailable(f"the SGLang server at {self.url} {what}. The end of its log:\n{tail}")


@contextlib.contextmanager
def engines(options: EngineOptions, count: int, *, timeout_s: float = 180.0) -> Iterator[list[str]]:
    """Addresses of `count` servers that are ready, started beside one another; they end with the block."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(EngineServer(options)) for _ in range(count)]
        for server in servers:
            server.wait_ready(timeout_s)
        yield [server.url for server in servers]


def _new_log() -> str:
    handle, path = tempfile.mkstemp(prefix="r3channel-engine-", suffix=".log")
    os.close(handle)
    return path


def _popen(command: Sequence[str], *, env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command), env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
    )


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(pid: int, port: int) -> bool:
    """Is `port` bound by process `pid` itself: on a port that was taken meanwhile somebody else would answer."""
    import psutil

    with contextlib.suppress(psutil.Error):
        sockets = psutil.Process(pid).net_connections(kind="tcp")
        return any(s.status == psutil.CONN_LISTEN and s.laddr and s.laddr[1] == port for s in sockets)
    return False


def kill_family(child: subprocess.Popen[Any], *, timeout_s: float = 10.0) -> None:
    """Kill `child` and everything below it, by process id, and reap it."""
    import psutil

    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(child.pid)
        family = [*top.children(recursive=True), top]
    segments = segments_of(process.pid for process in family)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait(timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while any(map(_is_alive, family)) and time.monotonic() < deadline_s:
        time.sleep(_END_POLL_S)
    for segment in segments:
        segment.unlink(missing_ok=True)


def _is_alive(process: psutil.Process) -> bool:
    """A zombie is gone: its parent, which is not this process, may never reap it."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def segments_of(pids: Iterable[int]) -> set[Path]:
    """Shared memory of SGLang's processes, 24 MiB for an engine, which nobody unlinks once they are killed. Asked before that:
    some are named by their process, some are known by its maps alone."""
    found: set[Path] = set()
    for pid in pids:
        found.update(Path("/dev/shm").glob(f"sgl_shm_*_{pid}_*"))
        with contextlib.suppress(OSError):
            found.update(map(Path, _LOADS.findall(Path(f"/proc/{pid}/maps").read_text())))
    return found
