"""Transport `nixl` (optional extra, package `nixl`): one-sided reads, over RDMA or another path that UCX finds.

The code follows NIXL's Python documentation. UCX authenticates and encrypts nothing: see --trust-network. The code has
**never run with the package or on hardware**: tests use a stand-in.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from shared.core import extras
from shared.core.errors import ConfigError, HandoffFailed
from shared.kv.pool import KVPool
from shared.transfer.digest import tensor_digests

POLL_S = 0.0001
MODULE = "nixl._api"


class NixlHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    metadata: bytes
    address: int
    num_pages: int
    page_bytes: int
    device: int
    nonce: int


def is_installed() -> bool:
    return importlib.util.find_spec("nixl") is not None


def import_nixl() -> Any:
    extras.require("nixl", "--transport nixl")
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise ConfigError(f"--transport nixl: the package nixl does not load: {error}") from error


class Nixl:
    """`library`: the nixl module."""

    name = "nixl"

    def __init__(self, pool: KVPool, library: Any) -> None:
        self._pool = pool
        self._agent = library.nixl_agent(f"baton-{pool.nonce:x}", library.nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory(pool.pages_bytes)

    def export(self) -> bytes:
        pool = self._pool
        address = pool.pages_bytes.data_ptr()
        metadata, device = self._agent.get_agent_metadata(), pool.device.index or 0
        return msgspec.msgpack.encode(
            NixlHandle(metadata, address, pool.num_pages, pool.page_bytes, device, pool.nonce)
        )

    def open(self, handle: bytes) -> OpenNixl:
        try:
            found = msgspec.msgpack.decode(handle, type=NixlHandle)
        except msgspec.MsgspecError as error:
            raise HandoffFailed(f"nixl: an invalid handle: {error}") from None
        if found.num_pages < 2 or found.page_bytes < 1 or found.address < 1:
            raise HandoffFailed(f"nixl: {found.num_pages} pages of {found.page_bytes} bytes at address {found.address}")
        return OpenNixl(self._pool, self._agent, found)


class OpenNixl:
    def __init__(self, own: KVPool, agent: Any, handle: NixlHandle) -> None:
        self.num_pages, self.page_bytes = handle.num_pages, handle.page_bytes
        self.owner = str(handle.nonce)  # an agent has the same pool for its whole life
        self._own, self._agent, self._remote = own, agent, handle
        self._peer = agent.add_remote_agent(handle.metadata)
        self._failed = False

    def read(self, pages: Sequence[int], part_bytes: slice, dst_pages: Sequence[int]) -> list[int]:
        """Wait without a time limit, because an unfinished read still writes into our pages."""
        own, remote, size = self._own, self._remote, part_bytes.stop - part_bytes.start
        base, device = own.pages_bytes.data_ptr(), own.device.index or 0
        here = [(base + dst * own.page_bytes + part_bytes.start, size, device) for dst in dst_pages]
        there = [(remote.address + src * remote.page_bytes + part_bytes.start, size, remote.device) for src in pages]
        kind = "VRAM" if own.device.type == "cuda" else "DRAM"
        descriptions = [self._agent.get_xfer_descs(places, mem_type=kind) for places in (here, there)]
        transfer = self._agent.initialize_xfer("READ", *descriptions, self._peer)
        try:
            state = self._agent.transfer(transfer)
            while state == "PROC":
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(transfer)
        finally:
            self._agent.release_xfer_handle(transfer)
        if state != "DONE":
            self._failed = True
            raise HandoffFailed(f"nixl: a read ended in state {state}")
        return tensor_digests(own, list(dst_pages), part_bytes)

    @property
    def is_dead(self) -> bool:
        """Return whether a read failed. A returning peer's pool is opened again."""
        return self._failed

    def close(self) -> None:
        self._agent.remove_remote_agent(self._peer)
