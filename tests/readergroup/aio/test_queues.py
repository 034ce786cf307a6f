"""Durable queues on the event loop: tasks that wait for room keep nothing else from running."""

from __future__ import annotations

import asyncio
import time

import pytest

import readergroup as rg
import synchronizer as sync
from readergroup import aio
from readergroup.aio.calls import CALL_THREADS, END_THREADS, WAIT_THREADS
from readergroup.aio.queues import ADD_THREADS
from tests.readergroup.aio.loops import run, until

pytestmark = pytest.mark.filterwarnings("error")

#: More than there are threads of any kind.
TASKS = max(ADD_THREADS, CALL_THREADS, END_THREADS, WAIT_THREADS) + 10


def test_tasks_that_wait_for_room_let_the_handler_add_to_another_queue() -> None:
    async def test() -> None:
        async with aio.connect("memory://", timeout=1000) as client:
            other = await client.event_queue("other")
            queue = await client.event_queue("queue", max_outstanding_bytes=100)

            async def handle(event: rg.QueuedEvent) -> None:
                await other.add(event.data)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(TASKS):
                    tasks.create_task(queue.add(b"x" * 60))
                processor = await client.event_processor("queue", handle)
            await processor.drain()
            assert processor.processed_events == TASKS

    run(test())


def test_tasks_that_wait_for_room_let_others_close() -> None:
    async def test() -> None:
        async with aio.connect("memory://", timeout=1000) as client:
            queue = await client.event_queue("queue", max_outstanding_bytes=10)
            await queue.add(b"x" * 20)
            waiting = [asyncio.create_task(queue.add(b"x" * 20)) for _ in range(TASKS)]
            visits = await client.counter("visits")
            async with client.leader_election("election", "a") as election:
                await election.campaign()
            await visits.close()
            assert not any(task.done() for task in waiting)
            await queue.close()
            found = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(each) for each in found} == {rg.ClosedError}

    run(test())


def test_a_task_that_waits_for_room_behind_others_waits_no_longer_than_its_timeout() -> None:
    async def test() -> None:
        async with aio.connect("memory://", timeout=1000) as client:
            queue = await client.event_queue("queue", max_outstanding_bytes=10)
            await queue.add(b"x" * 20)
            waiting = [asyncio.create_task(queue.add(b"x" * 20)) for _ in range(ADD_THREADS)]
            await until(lambda: queue._adding.running == ADD_THREADS)
            began = time.monotonic()
            with pytest.raises(rg.DeadlineExceededError, match="nothing was written"):
                await queue.add(b"late", timeout=0.05)
            assert time.monotonic() - began < 100
            handled: list[bytes] = []
            processor = await client.event_processor("queue", lambda event: handled.append(event.data))
            await asyncio.gather(*waiting)
            await processor.drain()
            assert handled == [b"x" * 20] * (ADD_THREADS + 1)

    run(test())


def test_a_handler_may_close_its_own_processor() -> None:
    async def test() -> None:
        async with aio.connect("memory://", timeout=1000) as client:
            closed = asyncio.Event()

            async def handle(event: rg.QueuedEvent) -> None:
                await processor.close()
                closed.set()

            processor = await client.event_processor("queue", handle)
            await processor.add(b"x")
            await closed.wait()
            await processor.join()
            queue = await client.event_queue("queue")
            assert await queue.outstanding_bytes == 0

    run(test())


def test_a_handler_that_cancels_its_own_task_has_failed() -> None:
    async def test() -> None:
        async with aio.connect("memory://", timeout=1000) as client:

            async def handle(event: rg.QueuedEvent) -> None:
                if event.data == b"bad":
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()
                    await asyncio.sleep(1000)

            retries = sync.Retries(attempts=2, first_delay_seconds=0.001)
            processor = await client.event_processor("queue", handle, retries=retries, set_aside=True)
            await processor.add_many([b"good", b"bad", b"good"])
            await processor.drain()
            assert [letter.data async for letter in processor.dead_letters()] == [b"bad"]

    run(test())


def test_a_block_that_was_not_entered_says_so() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            with pytest.raises(rg.InvalidArgumentError, match="not entered"):
                await client.lock("lock").__aexit__(None, None, None)
            opening = client.event_queue("queue")
            async with opening:
                with pytest.raises(rg.InvalidArgumentError, match="another task"):
                    await opening.__aenter__()
            async with opening:
                pass

    run(test())
