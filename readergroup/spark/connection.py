"""Keeps one client per process and address, because a worker of Spark runs many tasks."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from functools import cache
from typing import Final

from pydantic import SecretStr

from synchronizer import (
    Deadline,
    InvalidArgumentError,
    SystemClock,
    UnsupportedError,
    open_store,
)
from synchronizer.backoff import Backoff

from ..client import Client

#: Space for two batches. Linux may limit it by ``net.core.wmem_max``.
_PIPE_BYTES: Final = 2 * 1024 * 1024

_clients: Final[dict[tuple[int, str], Client]] = {}


def client_of(url: SecretStr) -> Client:
    """Return this process's client of the address. It stays open as long as the process runs."""
    key = os.getpid(), url.get_secret_value()
    if key not in _clients:
        # A worker collects garbage after each task: freezing exempts the modules imported so far.
        gc.freeze()
        clock = SystemClock()
        _clients[key] = Client(open_store(key[1], clock=clock, must_exist=True), clock=clock)
    return _clients[key]


def backoff_of(client: Client) -> Backoff:
    """Return the backoff of one call with an unavailable store: an error in planning would end a streaming query."""
    return Backoff(client.clock, Deadline(client.clock, client.timeout))


def check_address(url: SecretStr, *, one_host: bool) -> None:
    """Refuse a store that Spark's processes, on one host or on several, cannot share."""
    address = url.get_secret_value()
    scheme, _, rest = address.partition("://")
    if scheme == "memory":
        raise UnsupportedError(
            "the processes of Spark cannot use a store in memory; use a SQLite file, PostgreSQL or NATS",
            scheme=scheme,
        )
    if scheme != "sqlite":
        return
    if not one_host:
        raise UnsupportedError(
            "the executors may run on several hosts, and a SQLite file serves only one; use PostgreSQL or NATS, "
            "or a master 'local[...]' or 'local-cluster[...]'",
            scheme=scheme,
        )
    if not rest.startswith("//"):
        raise InvalidArgumentError(
            "the processes of Spark run in other folders; write the absolute path, after four slashes: "
            "'sqlite:////var/lib/shop.db'"
        )


@cache
def widen_pipe() -> None:
    """Widen a worker's pipe to Java to hold a whole batch, so that it can make the next one while Java reads."""
    for file in map(int, os.listdir("/dev/fd")):
        # Files that are no connected sockets raise.
        with contextlib.suppress(OSError), socket.fromfd(file, socket.AF_UNIX, socket.SOCK_STREAM) as pipe:
            if not isinstance(pipe.getpeername(), tuple):  # TCP has a tuple and widens by itself
                pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIPE_BYTES)
