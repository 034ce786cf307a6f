"""Dead letters on the event loop."""

from __future__ import annotations

import asyncio

import readergroup as rg
from readergroup import aio


def test_letters_are_listed_replayed_and_discarded() -> None:
    async def run() -> None:
        async with aio.connect("memory://") as client:
            await client.streams.create("shop/orders")
            await client.streams.create("shop/dead")
            async with client.writer("shop/orders") as writer:
                await writer.write(b"bad", "ann")
            (part,) = await client.batch.segment_ranges("shop/orders")
            (event,) = [event async for event in client.batch.read(part)]
            async with client.writer("shop/dead", serializer=rg.PydanticSerializer(rg.DeadLetter)) as writer:
                for _ in range(2):
                    letter = rg.DeadLetter(data=event.raw, pointer=event.pointer, error="ValueError: bad", attempts=1)
                    await writer.write(letter, event.routing_key)
            letters = client.dead_letters("shop/dead")
            assert letters.stream == "shop/dead"
            first, second = [letter async for letter in letters.list()]
            assert await letters.replay(first.pointer) == 1
            assert await letters.discard() == 1
            assert (await letters.show(second.pointer)).status == "discarded"

    asyncio.run(run())
