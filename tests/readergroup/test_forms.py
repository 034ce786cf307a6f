"""The wrong one of ``with`` and ``async with``, or of the two kinds of ``for``: the error names the right one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import readergroup as rg
from readergroup import aio
from readergroup.outbox.relay import OutboxRelay

STREAM = "shop/orders"
FORMS = ("with", "for", "async with", "async for")


async def used(what: Any, form: str) -> str:
    """The error of an object that is used in this form."""
    with pytest.raises(TypeError) as raised:
        match form:
            case "with":
                with what:
                    pass
            case "for":
                for _ in what:
                    pass
            case "async with":
                async with what:
                    pass
            case _:
                async for _ in what:
                    pass
    return str(raised.value)


async def enter_client_that_blocks() -> None:  # mypy refuses it as well
    async with rg.connect("memory://"):  # type: ignore[attr-defined]
        pass


def test_async_forms_of_objects_that_block_are_refused_in_words() -> None:
    with rg.connect("memory://") as client:
        client.streams.create(STREAM)
        with client.writer(STREAM) as writer, client.groups.create("billing", streams=[STREAM]).reader("r1") as reader:
            for what in (client, writer, reader):
                says = asyncio.run(used(what, "async with"))
                assert says.startswith(f"use 'with', not 'async with': this {type(what).__name__} blocks"), says
            says = asyncio.run(used(reader, "async for"))
            assert says.startswith("use 'for', not 'async for'"), says
            assert "__aiter__" in asyncio.run(used(client, "async for"))  # it is not iterable at all
    with pytest.raises(TypeError, match="use 'with'"):
        asyncio.run(enter_client_that_blocks())
    relay = OutboxRelay.__new__(OutboxRelay)
    assert asyncio.run(used(relay, "async with")).startswith("use 'with', not 'async with'")


def test_plain_forms_of_objects_for_asyncio_are_refused_in_words() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await client.streams.create(STREAM)
            group = await client.groups.create("billing", streams=[STREAM])
            pool = await group.pool(print)
            async with client.writer(STREAM) as writer, group.reader("r1") as reader, client.lock("door") as lock:
                for what in (client, writer, reader, pool, lock):
                    says = await used(what, "with")
                    assert says == f"use 'async with', not 'with': this {type(what).__name__} is for asyncio"
                assert (await used(reader, "for")).startswith("use 'async for', not 'for'")
            for what in (aio.connect("memory://"), group.reader("r2"), client.writer(STREAM), client.lock("door")):
                assert (await used(what, "with")).startswith("use 'async with', not 'with'")
            for form in ("for", "async for"):
                assert (await used(group.reader("r3"), form)).startswith("open it first: await it, or use 'async with'")

    asyncio.run(test())
    with pytest.raises(TypeError, match="use 'async with'"), aio.connect("memory://"):  # type: ignore[attr-defined]
        pass
