"""What the engine's child process runs: SGLang's own server, ended when the process that started it is gone.

R3DEMO_PARENT_PID=... python -m examples.embedded.sglang_main --model-path ...   (arguments are SGLang's)
"""

from __future__ import annotations

import os
import runpy
import threading
import time

_POLL_S = 0.5


def follow_parent(parent_pid: int) -> None:
    """End this process's whole family once `parent_pid` is no longer its parent. Runs for ever; call it in a thread.

    Polled instead of PR_SET_PDEATHSIG: that signal comes when the *thread* that started the child ends.
    """
    import psutil

    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(1)


def main() -> None:
    parent_pid = os.environ.get("R3DEMO_PARENT_PID")
    if parent_pid:
        threading.Thread(target=follow_parent, args=(int(parent_pid),), daemon=True).start()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
