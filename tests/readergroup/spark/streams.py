"""Streams for the tests: events that say who they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import readergroup as rg
from readergroup.spark.offsets import cuts_of

STREAM = "shop/orders"
KEYS = 17


def write(client: rg.Client, numbers: Iterable[int], *, block: int = 20, padding: int = 0) -> None:
    """Write these numbers, each under one of the keys, ``block`` of them at a time."""
    with client.writer(STREAM) as writer:
        for place, number in enumerate(numbers):
            writer.write(b'{"id":%d%s}' % (number, b" " * padding), routing_key=str(number % KEYS))
            if place % block == block - 1:
                writer.flush()


def number(event: bytes) -> int:
    return int(event.strip(b'{"id:} '))


def cut_of(offset: Mapping[str, Any] | str) -> rg.StreamCut:
    """Return the cut of an offset of one stream."""
    (cut,) = cuts_of(offset).values()
    return cut


def assert_in_order(numbers: Sequence[int], count: int) -> None:
    """Each number once; those of each key in the order in which they were written."""
    assert sorted(numbers) == list(range(count))
    for key in range(KEYS):
        of_key = [each for each in numbers if each % KEYS == key]
        assert of_key == sorted(of_key), f"key {key}"


def recorded(folder: Path) -> list[int]:
    """What the batches of a query recorded, one file for each batch."""
    found: list[int] = []
    for path in sorted(folder.glob("batch-*"), key=lambda path: int(path.name.removeprefix("batch-"))):
        found += map(int, path.read_text().split())
    return found
