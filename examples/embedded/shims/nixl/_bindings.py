"""`nixl_cu12._bindings`: the errors that SGLang catches."""

from nixl_cu12._bindings import nixlBackendError, nixlCancelledError, nixlRemoteDisconnectError

__all__ = ["nixlBackendError", "nixlCancelledError", "nixlRemoteDisconnectError"]
