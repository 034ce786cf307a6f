"""What a handler changes in an event that it fails on: the next attempt, others and the dead letter do not have it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import readergroup as rg

ORIGINAL = {"b": 1}


def spoil(event: rg.Event[Any], seen: list[tuple[Any, Mapping[str, bytes]]]) -> None:
    seen.append((dict(event.data), event.headers))
    event.data["spoilt"] = True
    event.headers["spoilt"] = b""  # type: ignore[index]
    raise ValueError("no")


def handlers(seen: list[Any]) -> dict[str, dict[str, Callable[..., object]]]:
    async def handle(event: rg.Event[Any]) -> None:
        await asyncio.sleep(0)
        spoil(event, seen)

    def handle_batch(batch: rg.EventBatch[Any]) -> None:
        for event, data in zip(batch, batch.data, strict=True):
            seen.append((dict(data), event.headers))
            data["spoilt"] = True
            event.headers["spoilt"] = b""  # type: ignore[index]
        raise ValueError("no")

    return {
        "plain": {"handle": lambda event: spoil(event, seen)},
        "async": {"handle": handle},
        "batch": {"handle_batch": handle_batch},
    }


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "async", "batch"])
@pytest.mark.parametrize("headers", [{}, {"trace": b"1"}])
def test_of_a_pool(tmp_path: Path, kind: str, concurrency: int, headers: dict[str, bytes]) -> None:
    seen: list[tuple[Any, Mapping[str, bytes]]] = []
    with rg.connect(f"sqlite:///{tmp_path}/s.db") as client:
        client.streams.create("shop/orders")
        client.streams.create("shop/dead")
        with client.writer("shop/orders", serializer=rg.JsonSerializer()) as writer:
            for _ in range(3):
                writer.write(ORIGINAL, routing_key="k", headers=headers)
        client.streams.seal("shop/orders")
        group = client.groups.create("billing", streams=["shop/orders"])
        retry = rg.RetryPolicy(attempts=2, first_delay_seconds=0.01, dead_letters="shop/dead")
        pool = group.pool(
            **handlers(seen)[kind], serializer=rg.JsonSerializer(), readers=1, concurrency=concurrency, retry=retry
        )
        pool.run()
        letters = list(client.dead_letters("shop/dead").list())
        assert len(seen) >= 6
        assert all(each == (ORIGINAL, headers) for each in seen)
        assert [letter.headers for letter in letters] == [headers] * 3
