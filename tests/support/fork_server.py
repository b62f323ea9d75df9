"""Processes that begin where their imports are made: a restart takes a tenth of the CPU time, and nothing else of it is spared.

python -m tests.support.fork_server SOCKET MODULE[:FUNCTION]...    imports these, calls the functions, then forks for whoever asks
python fork_server.py SOCKET FILE ARGUMENT...                    asks, in the place of `python FILE ARGUMENT...`
"""

from __future__ import annotations

import json
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence


def ask(server: str, command: Sequence[str], environment: Mapping[str, str], files: list[int]) -> int:
    """`files`: its standard ones. Returns the process's id once the server has made its imports."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(server)
        socket.send_fds(link, [b"\n"], files)
        link.sendall(json.dumps([[*command], dict(environment)]).encode())
        link.shutdown(socket.SHUT_WR)
        return int(link.makefile().read())


def _serve(server: socket.socket) -> list[str]:
    """Returns in new processes alone, each with its command."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    starter = os.getppid()
    while True:
        while not select.select([server], [], [], 1.0)[0]:
            if os.getppid() != starter:
                sys.exit()
        link = server.accept()[0]
        files = socket.recv_fds(link, 1, 3)[1]
        command, environment = json.loads(link.makefile().read())
        if pid := os.fork():
            link.sendall(str(pid).encode())
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(environment)
            random.seed()
            for number, file in enumerate(files):
                os.dup2(file, number)
        link.close()
        for file in files:
            os.close(file)
        if not pid:
            return command


def main(path: str, *names: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}.new")
        server.listen(64)
        os.rename(f"{path}.new", path)  # who sees it may connect
        for name in names:
            if callable(found := pkgutil.resolve_name(name)):
                found()
        sys.argv = _serve(server)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if __spec__ is None:
        ask(sys.argv[1], sys.argv[2:], os.environ, [0, 1, 2])
    else:
        main(*sys.argv[1:])
