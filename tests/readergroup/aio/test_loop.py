"""The event loop never waits for the store, and nothing of ours is left after the end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import readergroup as rg
from readergroup import aio
from readergroup.aio.calls import CALL_THREADS, WAIT_THREADS, Threads
from synchronizer import open_store
from tests.readergroup.aio.loops import STREAM, HangingStore, fill, run, until
from tests.waiting import PATIENCE_SECONDS, STARTS_A_THREAD
from tests.waiting import until as wait_until

#: The most that one step of the loop may compute. Processor time: others may have the machine.
STEP_SECONDS = 0.005


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("readergroup.aio")]


def test_the_loop_turns_while_the_store_hangs() -> None:
    async def test() -> None:
        store = HangingStore()
        async with aio.Client(store, timeout=1000) as client:
            await fill(client, 100)
            group = await client.groups.create("billing", streams=[STREAM])
            async with group.reader("reader") as reader, client.writer(STREAM, timeout=1000) as writer:
                counter = await client.counter("visits")
                assert await reader.read() is not None
                with store.hangs():
                    async with asyncio.TaskGroup() as tasks:
                        waiting = [
                            tasks.create_task(call)  # type: ignore[arg-type]
                            for call in (
                                counter.add(1),
                                writer.write(b"durable", wait=True),
                                reader.read_batch(5000),
                                client.streams.info(STREAM),
                                hold(client, "lock"),
                                group.segment_notifier.wait(timeout=1000),
                                group.synchronizer.wait_for(lambda state: True, timeout=1000),
                                *(client.streams.create(f"shop/{number}") for number in range(2 * CALL_THREADS)),
                            )
                        ]
                        await until(lambda: store.hanging > CALL_THREADS)
                        for turn in range(300):  # the loop would not get here
                            await asyncio.sleep(0.001)
                            if turn % 50 == 0:
                                await writer.write(b"in the background")
                                assert reader.position() and counter.value == 0
                        assert not waiting[0].done() and not waiting[1].done()
                        assert len(own_threads()) <= CALL_THREADS + WAIT_THREADS + 2
                        store._answers.set()

    run(test())


def test_the_timeout_of_a_call_begins_before_it_has_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        store, loop = HangingStore(), asyncio.get_running_loop()
        async with aio.Client(store, timeout=0.2) as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM, timeout=1000) as writer:
                counter, numbers = await client.counter("visits"), await client.shared_map("numbers", int)
                found: list[float | None] = []

                def info(name: str, *, timeout: float | None = None) -> None:
                    found.append(timeout)

                with store.hangs():
                    others = [
                        asyncio.create_task(client.streams.info(STREAM, timeout=1000)) for _ in range(CALL_THREADS)
                    ]
                    await until(lambda: store.hanging == CALL_THREADS)
                    for call in (
                        client.streams.info(STREAM, timeout=0.1),
                        counter.add(1, timeout=0.1),
                        counter.add(1),  # the timeout of the counter is the client's
                        numbers.put("one", 1, timeout=0.1),
                        writer.flush(timeout=0.1),
                    ):
                        begun = loop.time()
                        with pytest.raises(rg.DeadlineExceededError, match="this one was not begun"):
                            await call  # type: ignore[misc]
                        assert loop.time() - begun < 100.0  # the others have ten times as much
                    opening = asyncio.create_task(client.writer(STREAM, timeout=100)._open())
                    locking = asyncio.create_task(hold(client, "lock"))
                    monkeypatch.setattr(client.streams._wrapped, "info", info)
                    monkeypatch.setattr(client._calls, "timeout", 1000.0)
                    later = [
                        asyncio.create_task(client.streams.info(STREAM, **options))
                        for options in ({}, {"timeout": 1000})
                    ]
                    await asyncio.sleep(0.1)
                await asyncio.gather(*others, *later, locking)
                async with await opening as another:
                    assert another.timeout == 100
                assert len(found) == 2 and all(left is not None and 0.0 < left < 999.95 for left in found)
                await client.streams.info(STREAM)
                assert found[2] is None
                assert counter.value == 0

    run(test())


async def hold(client: aio.Client, name: str) -> None:
    async with client.lock(name, timeout=1000):
        pass


def test_no_step_of_the_loop_computes_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[float, str]] = []
    original = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        original(handle)
        steps.append((time.thread_time() - begun, repr(handle)[:300]))

    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 1, segments=4)
            group = await client.groups.create("billing", streams=[STREAM])
            async with client.writer(STREAM) as writer, group.reader("reader") as reader:
                monkeypatch.setattr(asyncio.Handle, "_run", timed)

                async def write() -> None:
                    for number in range(30_000):
                        await writer.write(b"x" * 100, routing_key=str(number % 50))
                        if number % 50 == 0:
                            await asyncio.sleep(0)

                async def read() -> None:
                    left = 30_000
                    async for _ in reader:
                        left -= 1
                        if not left:
                            return

                async with asyncio.TaskGroup() as tasks:
                    for each in (write(), read(), *(client.counter(f"c-{n}").__aenter__() for n in range(20))):
                        tasks.create_task(each)  # type: ignore[arg-type]
        monkeypatch.undo()

    run(test())
    assert len(steps) > 300
    # The slowest may have met a collection of garbage, which takes as long as the whole test run has objects.
    slowest = sorted(steps, reverse=True)
    assert slowest[3][0] < STEP_SECONDS, slowest[:5]


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_closed_client_is_closed_again_in_another_loop(is_closed: bool) -> None:
    client = aio.Client(open_store("memory://"))
    first = asyncio.new_event_loop()
    try:
        first.run_until_complete(client.close())
        if is_closed:
            first.close()
        asyncio.run(asyncio.wait_for(client.close(), PATIENCE_SECONDS))
    finally:
        first.close()


def test_closing_ends_all_threads() -> None:
    before = {*threading.enumerate()}

    async def test() -> None:
        client = await aio.connect("memory://")
        await fill(client, 100)
        group = await client.groups.create("billing", streams=[STREAM])
        reader = await group.reader("reader")
        await reader.read()
        writer = await client.writer(STREAM)
        await writer.write(b"event")
        transaction = await writer.transaction()
        await transaction.write(b"event")
        await (await client.membership("members", "me")).join()
        await (await client.leader_election("election", "me")).campaign()
        waits = [
            asyncio.create_task(each)  # type: ignore[arg-type]
            for each in (
                group.segment_notifier.wait(timeout=1000),
                reader.read_batch(timeout=1000),
                first(group.reader_notifier),
                group.synchronizer.wait_for(lambda state: False, timeout=1000),
                (await client.barrier("barrier", 2)).wait(timeout=1000),
                (await client.leader_election("election", "other")).campaign(),
            )
        ]
        await asyncio.sleep(0.05)
        await client.close()
        await asyncio.wait(waits)
        for each in waits:
            each.exception()
        await until(lambda: own_threads() == [])
        for call in (client.streams.exists(STREAM), reader.read(), client.counter("c")):
            with pytest.raises(rg.ClosedError):
                await call

    run(test())
    shared = {"delayed-calls", "APScheduler"}
    wait_until(lambda: not [t for t in {*threading.enumerate()} - before if t.name not in shared])


async def first(notifier: aio.Notifier) -> None:  # type: ignore[type-arg]
    async for _ in notifier:
        pass


OPEN_AT_THE_END = """
import asyncio, readergroup as rg, readergroup.aio as aio

async def main():
    client = await aio.connect("sqlite:///shop.db")
    await client.streams.create("shop/orders")
    group = await client.groups.create("billing", streams=["shop/orders"])
    writer = await client.writer("shop/orders")
    await writer.write(b"event")
    reader = await group.reader()
    tasks = [asyncio.create_task(each) for each in (
        reader.read(timeout=1000), group.segment_notifier.wait(timeout=1000),
        (await client.leader_election("e", "a")).campaign(), (await client.leader_election("e", "b")).campaign(),
        (await client.barrier("b", 2)).wait(timeout=1000), hold(client), hold(client),
    )]
    await asyncio.sleep(0.3)
    print("open", flush=True)
    {end}

async def hold(client):
    async with client.lock("l", timeout=1000):
        await asyncio.sleep(1000)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_the_process_ends_with_all_things_open(tmp_path: object, is_interrupted: bool) -> None:
    program = OPEN_AT_THE_END.replace("{end}", "await asyncio.sleep(1000)" if is_interrupted else "")
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=str(tmp_path)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    if is_interrupted:
        os.kill(process.pid, signal.SIGINT)
    rest, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (rest, process.returncode) == ("interrupted\n" if is_interrupted else "", 0), errors
    assert "Traceback" not in errors
    with rg.connect(f"sqlite:///{tmp_path}/shop.db") as client:
        (part,) = client.batch.segment_ranges("shop/orders")
        assert [event.data for event in client.batch.read(part)] == [b"event"]


BATCH_AT_THE_END = """
import asyncio, time, readergroup.aio as aio

async def main():
    client = await aio.connect("sqlite:///shop.db")
    await client.streams.create("shop/orders")
    writer = await client.writer("shop/orders")
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def events():
        loop.call_soon_threadsafe(begun.set)
        while not any(write._sleeping for write in writer._wrapped.begun_writes):
            time.sleep(0.001)  # until the end of the process closes the writer
        yield b"event"

    writing = asyncio.create_task(writer.write_batch(events()))
    await begun.wait()

asyncio.run(main())
"""


def test_the_end_of_the_process_waits_for_a_cancelled_batch(tmp_path: object) -> None:
    options: Any = {"capture_output": True, "text": True, "cwd": str(tmp_path), "timeout": 60}
    process = subprocess.run([sys.executable, "-c", BATCH_AT_THE_END], **options)
    assert (process.returncode, process.stderr) == (0, "")
    with rg.connect(f"sqlite:///{tmp_path}/shop.db") as client:
        (part,) = client.batch.segment_ranges("shop/orders")
        assert [event.data for event in client.batch.read(part)] == [b"event"]


def test_a_closed_client_does_not_wait_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("readergroup.aio.calls.CLOSE_SECONDS", 0.05)

    async def test() -> None:
        store = HangingStore()
        client = aio.Client(store)
        with store.hangs():
            call = asyncio.create_task(client.streams.exists(STREAM))
            await until(lambda: store.hanging)
            await client.close()
            assert not call.done()
        await asyncio.wait([call])

    run(test())


def test_a_loop_that_ends_during_a_close_leaves_no_error_of_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    go_on = threading.Event()
    close = rg.Client.close
    monkeypatch.setattr(rg.Client, "close", lambda client: (go_on.wait(), close(client)))

    async def test() -> None:
        closing = asyncio.create_task(aio.Client(rg.connect("memory://").store).close())
        await until(lambda: any("close" in name for name in own_threads()))
        closing.cancel()

    run(test())
    go_on.set()
    wait_until(lambda: not own_threads())
    assert not raised


def test_a_call_that_is_cancelled_before_it_begins_does_not_run_and_what_it_opened_is_closed() -> None:
    async def test() -> None:
        threads = Threads("readergroup.aio test", 1)
        begun, go_on, ran, undone = threading.Event(), threading.Event(), [], []

        def open() -> str:
            begun.set()
            go_on.wait()
            return "opened"

        calls = (
            threads.call(open, undo=undone.append),
            threads.call(lambda: ran.append(2)),
            threads.call(lambda: ran.append(3), is_certain=True),
        )
        tasks = [asyncio.create_task(call) for call in calls]  # type: ignore[arg-type]
        await until(begun.is_set)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        go_on.set()
        await until(lambda: undone)
        assert (ran, undone) == ([3], ["opened"])
        threads.close()
        with pytest.raises(rg.ClosedError):
            threads.start(print)

    run(test())


def test_threads_are_bounded_and_end_when_they_are_idle() -> None:
    async def test() -> None:
        threads = Threads("readergroup.aio test", 3, idle_seconds=0.01)
        running, most, lock = 0, 0, threading.Lock()

        def work() -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            wait_until(lambda: most >= 3, "three run at once")
            time.sleep(0.001)
            with lock:
                running -= 1

        await asyncio.gather(*(threads.start(work) for _ in range(100)))
        assert most == 3
        await until(lambda: threads.running == 0)
        assert await threads.start(lambda: 5) == 5
        threads.close()

    run(test())


def test_a_system_without_threads_raises_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    async def test() -> None:
        async with aio.connect("memory://") as client:
            monkeypatch.setattr(threading, STARTS_A_THREAD, refuse)
            with pytest.raises(rg.StoreUnavailableError):
                await aio.connect("memory://")
            monkeypatch.undo()
            assert not await client.streams.exists(STREAM)

    run(test())


def test_a_manual_clock_is_refused() -> None:
    async def test() -> None:
        with pytest.raises(rg.InvalidArgumentError, match="clock"):
            await aio.connect("memory://", clock=rg.ManualClock())
        with pytest.raises(rg.InvalidArgumentError):
            await aio.connect("memory://", timeout=-1)
        with pytest.raises(rg.UnsupportedError):
            async with aio.connect("nosuch://"):
                pass

    run(test())
    wait_until(lambda: own_threads() == [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_cannot_use_the_client() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await client.streams.create(STREAM)
            threads = client._calls._calls
            child = os.fork()
            if child == 0:
                try:
                    threads.submit(lambda: None)
                except rg.ClosedError:
                    os._exit(7)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    run(test())


@pytest.mark.parametrize("what", ["lock", "semaphore", "watch", "observe", "notifier"])
def test_what_an_iteration_holds_ends_quietly_with_the_loop(what: str, caplog: pytest.LogCaptureFixture) -> None:
    async def held(block: Any) -> AsyncIterator[object]:
        async with block:
            yield None

    async def test() -> AsyncIterator[object]:
        client = await aio.connect("memory://")
        if what == "lock":
            iteration = held(client.lock("lock"))
        elif what == "semaphore":
            iteration = held(client.semaphore("semaphore", permits=1))
        elif what == "watch":
            iteration = (await client.shared_map("visits", int)).watch()
        elif what == "observe":
            iteration = (await client.leader_election("election", "a")).observe()
        else:
            await client.streams.create(STREAM)
            group = await client.groups.create("billing", streams=[STREAM])
            iteration = aiter(group.reader_notifier)
        await anext(iteration)
        return iteration

    iteration = run(test())
    del iteration
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
