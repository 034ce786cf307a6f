"""How soon `wait` returns in one process after a write in another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Final

import readergroup as rg

from .figure import Figure, Result
from .measuring import SPAWN, percentile, process, receive
from .stores import Store

APPENDS = 500
SEGMENT: Final = "bench/log"
#: Long enough for the other process to wait again.
_PAUSE_SECONDS = 0.005
_PATIENCE_SECONDS = 30.0


def wait(store: Store) -> Iterator[Result]:
    """From the call of `append` in one process to the return of `wait` in another."""
    stored, woken = [], []
    with store.fresh() as url, rg.connect(url) as client:
        client.store.create(SEGMENT)
        ours, theirs = SPAWN.Pipe()
        with process(_wait, client, theirs):
            receive(ours, "the other process")
            for number in range(APPENDS):
                time.sleep(_PAUSE_SECONDS)
                begin = time.monotonic()
                client.store.append(SEGMENT, bytes(100), expected_offset=number * 100)
                stored.append(time.monotonic() - begin)
                woken.append(receive(ours, "the return of wait") - begin)
    what = "from a write in one process to the return of wait in another"
    yield Figure(
        what=f"{what}, 99 of 100",
        value=percentile(woken, 99) * 1000,
        unit="ms",
        target=20,
        better="less",
        beside=f"until append returned, 99 of 100 {percentile(stored, 99) * 1000:.1f} ms",
        note="On an overloaded machine nearly all of it is the append.",
    )
    yield Figure(what=f"{what}, half of them", value=percentile(woken, 50) * 1000, unit="ms", better="less")
    yield Figure(
        what="until append returned, half of them", value=percentile(stored, 50) * 1000, unit="ms", better="less"
    )


def _wait(client: rg.Client, pipe: Connection) -> None:
    pipe.send(None)
    length = 0
    while True:
        if client.store.wait({SEGMENT: length}, _PATIENCE_SECONDS):
            pipe.send(time.monotonic())
            length += 100
