"""`urlopen` that asks the named machine itself, whatever proxy the environment names: engines are on the cluster's network."""

from __future__ import annotations

import urllib.request
from typing import Any

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def urlopen(request: str | urllib.request.Request, *, timeout_s: float) -> Any:
    """Open a request without any proxy and return the response.

    The response is closed by `with`. Any thread may call.

    Raises:
        OSError: whatever `urllib.request.urlopen` raises.
    """
    return _OPENER.open(request, timeout=timeout_s)
