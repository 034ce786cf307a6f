"""One client for each process and address: workers of Spark are used for many tasks."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from functools import cache
from typing import Final

from pydantic import SecretStr

from synchronizer import Deadline, InvalidArgumentError, Patience, SystemClock, UnsupportedError, open_store

from ..client import Client

#: Room for two batches. Linux gives less where ``net.core.wmem_max`` says so.
_PIPE_BYTES: Final = 2 * 1024 * 1024

_clients: Final[dict[tuple[int, str], Client]] = {}


def client_of(url: SecretStr) -> Client:
    """The client of this address in this process. It stays open as long as the process runs."""
    key = os.getpid(), url.get_secret_value()
    if key not in _clients:
        # A worker collects garbage after each task: what was imported by now is not looked at again.
        gc.freeze()
        clock = SystemClock()
        _clients[key] = Client(open_store(key[1], clock=clock, must_exist=True), clock=clock)
    return _clients[key]


def patience_of(client: Client) -> Patience:
    """How long one call waits for a store that is away: an error in planning ends a streaming query."""
    return Patience(client.clock, Deadline(client.clock, client.timeout))


def check_address(url: SecretStr, *, one_host: bool) -> None:
    """Refuse a store that Spark's processes, on one host or on several, do not share."""
    address = url.get_secret_value()
    scheme, _, rest = address.partition("://")
    if scheme == "memory":
        raise UnsupportedError(
            "Spark reads in processes of its own, which do not see a store in memory; take a SQLite file, PostgreSQL "
            "or NATS",
            scheme=scheme,
        )
    if scheme != "sqlite":
        return
    if not one_host:
        raise UnsupportedError(
            "the executors may run on other hosts, and a SQLite file is for the processes of one; take PostgreSQL or "
            "NATS, or a master 'local[...]' or 'local-cluster[...]'",
            scheme=scheme,
        )
    if not rest.startswith("//"):
        raise InvalidArgumentError(
            "the processes of Spark run in folders of their own; write the whole path, after four slashes: "
            "'sqlite:////var/lib/shop.db'"
        )


@cache
def widen_pipe() -> None:
    """In a worker: let the pipe to Java take a whole batch, so that the next one is made while Java takes it."""
    for file in map(int, os.listdir("/dev/fd")):
        # What is no socket, or has no peer, raises.
        with contextlib.suppress(OSError), socket.fromfd(file, socket.AF_UNIX, socket.SOCK_STREAM) as pipe:
            if not isinstance(pipe.getpeername(), tuple):  # else it is no Unix domain socket, and widens by itself
                pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIPE_BYTES)
