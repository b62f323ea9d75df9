"""What the demo says while it runs: a line for each part that is ready, and on a terminal what is still waited for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

_POLL_S = 0.2


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def await_parts(parts: Mapping[str, Callable[[], bool]], *, timeout_s: float) -> None:
    """Return once every part says that it is ready. Raises what one of them raises, or TimeoutError naming those left."""
    from tqdm import tqdm

    begin_s, waiting = time.monotonic(), dict(parts)
    # `disable=None`: nothing where there is no terminal.
    with tqdm(
        total=len(parts), disable=None, leave=False, bar_format="{n}/{total} parts, {elapsed}: {desc}"
    ) as bar:
        while waiting:
            for name in [name for name, is_ready in waiting.items() if is_ready()]:
                del waiting[name]
                bar.update()
                bar.write(f"{name} is ready after {time.monotonic() - begin_s:.0f} s", file=sys.stderr)
            if waiting and time.monotonic() - begin_s > timeout_s:
                raise TimeoutError(f"not ready after {timeout_s:g} s: {', '.join(waiting)}")
            bar.set_description_str(f"waiting for {', '.join(waiting)}")
            time.sleep(_POLL_S if waiting else 0)
