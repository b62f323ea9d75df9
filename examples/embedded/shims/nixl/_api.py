"""`nixl_cu12._api`, in which memory that SGLang 0.5.23 calls VRAM (disaggregation/nixl/conn.py) is the host's, as it is here."""

from __future__ import annotations

from typing import Any

from nixl_cu12 import _api
from nixl_cu12._api import nixl_agent_config, nixl_thread_sync_t

__all__ = ["nixl_agent", "nixl_agent_config", "nixl_thread_sync_t"]


class nixl_agent(_api.nixl_agent):  # the name that SGLang imports
    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        return super().get_reg_descs(descs, _host(mem_type))

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        return super().get_xfer_descs(descs, _host(mem_type))

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str | None = None, **kwargs: Any
    ) -> Any:
        return super().prep_xfer_dlist(agent_name, xfer_list, _host(mem_type), **kwargs)


def _host(mem_type: str | None) -> str | None:
    return "DRAM" if mem_type == "VRAM" else mem_type
