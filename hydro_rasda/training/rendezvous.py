"""How the ranks of one full-size model find each other: by a file of their machine, or by a store on the network."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

Store = Any
"""One of torch.distributed's, which shows them to no type checker."""

ARRIVAL = timedelta(minutes=5)
"""A rank that starts late is no dead one: so long the others wait until all are there."""


def file_store(path: Path, world: int) -> Store:
    """A file as a store, for ranks of one machine alone, in a folder that only their user can enter."""
    # Else gloo listens where anyone who reaches the machine could write into it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return dist.FileStore(str(path), world)  # type: ignore[attr-defined]  # not exported


def listening_store(host: str) -> Store:
    """The store of rank 0, which listens at this address of its machine."""
    listener = _listener(host)
    if listener is None:
        return _tcp_store(host, 0, is_master=True)
    # By itself it would listen on all interfaces: anyone who reaches the machine could write into it.
    return _tcp_store(host, listener.getsockname()[1], is_master=True, master_listen_fd=listener.detach())


def reached_store(host: str, port: int) -> Store:
    """The store of another rank, where rank 0's listens at this address."""
    return _tcp_store(host, port, is_master=False)


def await_ranks(store: Store, rank: int, world: int) -> None:
    """Say that a rank is there, and wait for the others: the limit of the process group is for those that are."""
    store.set(f"here{rank}", "")
    store.wait([f"here{other}" for other in range(world)], ARRIVAL)


def _tcp_store(host: str, port: int, is_master: bool, master_listen_fd: int | None = None) -> Store:
    return dist.TCPStore(  # type: ignore[attr-defined]  # not exported
        host, port, is_master=is_master, timeout=ARRIVAL, wait_for_workers=False, master_listen_fd=master_listen_fd
    )


def _listener(host: str) -> socket.socket | None:
    """A socket that listens at this address alone; None where it is none of this machine's own, as behind a NAT."""
    try:
        return socket.create_server((host, 0), backlog=1024)
    except OSError:
        return None
