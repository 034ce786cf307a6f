"""Pools on the event loop: handlers run on the loop of the application, and stops, drains and errors are awaited."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

import readergroup as rg
from readergroup import aio
from readergroup.scaling import worker_process
from tests.clean_processes import CLEAN
from tests.readergroup.aio.loops import STREAM, HangingStore, fill, run, until
from tests.readergroup.scaling.handlers import Fault
from tests.waiting import PATIENCE_SECONDS, STARTS_A_THREAD
from tests.waiting import until as wait_until

DONE = "shop/done"


async def billing(client: aio.Client, count: int, *, segments: int = 2, seal: bool = True) -> aio.ReaderGroup:
    """A group with so many events to read."""
    await fill(client, count, segments=segments)
    if seal:
        await client.streams.seal(STREAM)
    return await client.groups.create("billing", streams=[STREAM], reader_timeout_seconds=60.0)


def pause(ended: int) -> float:
    """How long a handler takes when so many have ended: from the 21st on so long that the pool stops before all end."""
    return 0.01 if ended < 20 else 0.5


async def in_group(group: aio.ReaderGroup) -> int:
    return len((await group.distribution()).readers)


@pytest.mark.stores
@pytest.mark.parametrize("concurrency", [1, 16])
def test_handlers_run_on_the_loop_of_the_application_and_use_its_client(store_url: str, concurrency: int) -> None:
    async def test() -> None:
        here, running, most = threading.current_thread(), Counter[str | None](), 0
        seen: defaultdict[str | None, list[int]] = defaultdict(list)

        async with aio.connect(store_url) as client:
            await client.streams.create(DONE)
            group = await billing(client, 300, segments=4)
            async with client.writer(DONE) as done:

                async def handle(event: rg.Event[bytes]) -> None:
                    nonlocal most
                    running[event.routing_key] += 1
                    most = max(most, running.total())
                    assert running[event.routing_key] == 1
                    assert threading.current_thread() is here
                    await done.write(event.raw, wait=concurrency > 1)
                    seen[event.routing_key].append(int(event.raw))
                    running[event.routing_key] -= 1

                async with group.pool(handle, concurrency=concurrency) as pool:
                    await pool.join()
            assert sorted(sum(seen.values(), [])) == list(range(300))
            assert all(each == sorted(each) for each in seen.values())
            assert (most > 1) is (concurrency > 1)
            await client.streams.seal(DONE)
            copied = await client.groups.create("copied", streams=[DONE])
            async with copied.reader() as reader:
                assert sorted([int(event.raw) async for event in reader]) == list(range(300))

    run(test())


def test_plain_functions_run_in_threads() -> None:
    async def test() -> None:
        threads: set[threading.Thread] = set()
        async with aio.connect("memory://") as client:
            group = await billing(client, 50)
            await (await group.pool(lambda event: threads.add(threading.current_thread()), concurrency=4)).run()
        assert threads and threading.current_thread() not in threads

    run(test())


def test_batches_and_arrow_run_on_the_loop() -> None:
    async def test() -> None:
        here, seen = threading.current_thread(), [0, 0]

        async def batch(what: Any) -> None:
            assert threading.current_thread() is here
            seen[0] += len(what.raw)

        async def arrow(what: Any) -> None:
            assert threading.current_thread() is here
            assert what.schema.names == ["headers", "event"]
            seen[1] += what.num_rows

        async with aio.connect("memory://") as client:
            group = await billing(client, 500)
            await (await group.pool(handle_batch=batch)).run()
            again = await client.groups.create("again", streams=[STREAM])
            await (await again.pool(handle_arrow=arrow, columns=["headers", "event"], concurrency=2)).run()
        assert seen == [500, 500]

    run(test())


async def note(event: rg.Event[bytes]) -> None:
    await asyncio.sleep(0)
    with open(event.headers["file"].decode(), "a") as file:
        file.write(f"{os.getpid()}\n")


def test_worker_processes_run_an_async_def_on_loops_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "_spawn", CLEAN)

    async def test() -> None:
        async with aio.connect(f"sqlite:///{tmp_path}/shop.db") as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM) as writer:
                for _ in range(20):
                    await writer.write(b"", headers={"file": str(tmp_path / "pids").encode()})
            await client.streams.seal(STREAM)
            group = await client.groups.create("billing", streams=[STREAM])
            async with group.pool(note, workers="process", concurrency=4) as pool:
                await pool.join()
        pids = (tmp_path / "pids").read_text().split()
        assert len(pids) == 20 and str(os.getpid()) not in pids

    run(test())


# ---------------------------------------------------------------------- the end


@pytest.mark.parametrize("concurrency", [1, 8])
def test_leaving_the_block_finishes_what_runs_and_repeats_nothing(concurrency: int) -> None:
    async def test() -> None:
        begun, ended = Counter[bytes](), Counter[bytes]()

        async def handle(event: rg.Event[bytes]) -> None:
            begun[event.raw] += 1
            await asyncio.sleep(pause(len(ended)) if not has_left else 0.0)
            ended[event.raw] += 1

        has_left = False
        async with aio.connect("memory://") as client:
            group = await billing(client, 1000)
            async with group.pool(handle, concurrency=concurrency) as pool:
                await until(lambda: len(ended) >= 5)
            has_left = True
            assert begun == ended and ended.total() < 1000
            assert pool.error is None and pool.workers == ()
            assert await in_group(group) == 0
            async with group.pool(handle, concurrency=16) as pool:
                await pool.join()
        assert set(ended.values()) == {1} and len(ended) == 1000

    run(test())


def test_a_cancelled_run_drains(store_url: str) -> None:
    async def test() -> None:
        begun, ended = Counter[bytes](), Counter[bytes]()

        async def handle(event: rg.Event[bytes]) -> None:
            begun[event.raw] += 1
            await asyncio.sleep(pause(len(ended)))
            ended[event.raw] += 1

        async with aio.connect(store_url) as client:
            group = await billing(client, 1000)
            with pytest.raises(ExceptionGroup) as raised:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task((await group.pool(handle, concurrency=8)).run())
                    await until(lambda: len(ended) >= 5)
                    raise Fault
            assert raised.group_contains(Fault)
            assert begun == ended and ended.total() < 1000
            assert await in_group(group) == 0

    run(test())


def test_a_second_cancellation_does_not_wait_for_the_drain() -> None:
    async def test() -> None:
        goes_on = asyncio.Event()

        async def handle(event: rg.Event[bytes]) -> None:
            begun.set()
            await goes_on.wait()

        begun = asyncio.Event()
        async with aio.connect("memory://") as client:
            group = await billing(client, 1)
            pool = await group.pool(handle)
            running = asyncio.create_task(pool.run())
            await begun.wait()
            running.cancel()
            await asyncio.wait([running], timeout=0.05)
            assert not running.done()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert pool.workers
            goes_on.set()
            await pool.join()

    run(test())


def test_handlers_that_outlast_the_drain_are_cancelled() -> None:
    async def test() -> None:
        cancelled = 0

        async def handle(event: rg.Event[bytes]) -> None:
            nonlocal cancelled
            begun.set()
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                cancelled += 1
                raise

        begun = asyncio.Event()
        async with aio.connect("memory://") as client:
            group = await billing(client, 10)
            pool = await group.pool(handle, concurrency=4)
            running = asyncio.create_task(pool.run(drain_timeout=0.05))
            await begun.wait()
            pool.stop()
            await running
            assert await in_group(group) == 0
            await until(lambda: cancelled)

    run(test())


def test_what_ends_the_pool_is_raised_by_the_block_by_join_and_by_run() -> None:
    async def handle(event: rg.Event[bytes]) -> None:
        await asyncio.sleep(0)
        raise Fault("no such article")

    async def test() -> None:
        async with aio.connect("memory://") as client:
            group = await billing(client, 1)
            with pytest.raises(rg.HandlerError, match="no such article"):
                async with group.pool(handle) as pool:
                    await until(lambda: pool.error)
                    await asyncio.sleep(0)  # the block goes on
            with pytest.raises(rg.HandlerError) as raised:
                async with group.pool(handle, concurrency=4) as pool:
                    await pool.join()
            assert raised.value is pool.error and not hasattr(raised.value, "__notes__")
            with pytest.raises(Fault) as broken:
                async with group.pool(handle) as pool:
                    await until(lambda: pool.error)
                    raise Fault("of the block")
            assert "no such article" in broken.value.__notes__[0]
            with pytest.raises(ExceptionGroup) as cancelled:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task((await group.pool(handle)).run())
                    await asyncio.sleep(1000)
            assert cancelled.group_contains(rg.HandlerError)

    run(test())


def test_failed_events_are_retried_and_set_aside() -> None:
    async def test() -> None:
        attempts = Counter[bytes]()

        async def handle(event: rg.Event[bytes]) -> None:
            attempts[event.raw] += 1
            if event.raw == b"3":
                await asyncio.sleep(1000)
            if event.raw == b"4" and attempts[b"4"] == 1:
                raise Fault

        async with aio.connect("memory://") as client:
            await client.streams.create(DONE)
            group = await billing(client, 10)
            retry = rg.RetryPolicy(attempts=2, first_delay_seconds=0.001, dead_letters=DONE)
            await (await group.pool(handle, concurrency=4, retry=retry, handler_timeout_seconds=0.05)).run()
            assert attempts == {b"%d" % number: 2 if number in (3, 4) else 1 for number in range(10)}
            dead = await client.groups.create("dead", streams=[DONE])
            async with dead.reader() as reader:
                letter = await reader.read()
                assert letter is not None and b"handler_timeout_seconds" in letter.raw

    run(test())


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1000)


async def raise_generator_exit() -> None:
    raise GeneratorExit


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("end", [cancel_itself, raise_generator_exit])
def test_an_event_whose_handler_ends_its_task_is_set_aside(
    end: Callable[[], Awaitable[None]], concurrency: int
) -> None:
    async def test() -> None:
        handled = []

        async def handle(event: rg.Event[bytes]) -> None:
            if event.raw == b"3":
                await end()
            handled.append(event.raw)

        async with aio.connect("memory://") as client:
            await client.streams.create(DONE)
            group = await billing(client, 10)
            retry = rg.RetryPolicy(attempts=2, first_delay_seconds=0.001, dead_letters=DONE)
            await (await group.pool(handle, concurrency=concurrency, retry=retry)).run()
            assert sorted(handled) == [b"%d" % number for number in range(10) if number != 3]
            letters = [stored.letter async for stored in client.dead_letters(DONE).list()]
            assert [letter.data for letter in letters] == [b"3"]

    run(test())


def test_a_handler_that_cancels_the_only_task_of_its_loop_has_failed_too() -> None:
    async def handle(event: rg.Event[bytes]) -> None:
        if event.raw == b"3":
            await cancel_itself()

    async def begin() -> tuple[aio.Client, aio.ReaderPool[bytes]]:
        client = await aio.connect("memory://")
        await client.streams.create(DONE)
        group = await billing(client, 10)
        retry = rg.RetryPolicy(attempts=2, first_delay_seconds=0.001, dead_letters=DONE)
        return client, await (await group.pool(handle, retry=retry)).__aenter__()

    async def end(client: aio.Client, pool: aio.ReaderPool[bytes]) -> list[bytes]:
        async with client:
            assert pool._ended is not None and pool._ended.done()
            return [stored.letter.data async for stored in client.dead_letters(DONE).list()]

    with asyncio.Runner() as runner:
        client, pool = runner.run(begin())
        assert pool._ended is not None
        loop = runner.get_loop()
        pool._ended.add_done_callback(lambda ended: loop.stop())
        patience = loop.call_later(PATIENCE_SECONDS, loop.stop)
        loop.run_forever()
        patience.cancel()
        assert runner.run(end(client, pool)) == [b"3"]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_cancellation_of_all_tasks_is_no_fault_of_an_event(concurrency: int) -> None:
    async def test() -> None:
        begun = Counter[bytes]()
        is_begun = asyncio.Event()

        async def handle(event: rg.Event[bytes]) -> None:
            begun[event.raw] += 1
            if len(begun) == concurrency and not is_begun.is_set():
                is_begun.set()
                await asyncio.sleep(1000)
            if not is_begun.is_set():
                await asyncio.sleep(1000)

        async with aio.connect("memory://") as client:
            group = await billing(client, 10)
            async with group.pool(handle, concurrency=concurrency) as pool:
                await is_begun.wait()
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                await pool.join()
            assert sorted(begun) == [b"%d" % number for number in range(10)]
            assert sorted(begun.values()) == [1] * (10 - concurrency) + [2] * concurrency

    run(test())


def test_of_a_batch_that_is_handled_one_by_one_only_what_fails_is_set_aside() -> None:
    async def test() -> None:
        handled = set[bytes]()

        async def handle(batch: rg.EventBatch[bytes]) -> None:
            if len(batch) > 1:
                raise Fault
            task = asyncio.current_task()
            assert task is not None
            if batch.raw == [b"3"]:
                await cancel_itself()
            if batch.raw == [b"5"]:
                task.cancel()  # and returns
            await asyncio.sleep(0) if batch.raw == [b"6"] else None
            handled.update(batch.raw)

        async with aio.connect("memory://") as client:
            await client.streams.create(DONE)
            group = await billing(client, 10, segments=1)
            retry = rg.RetryPolicy(attempts=2, first_delay_seconds=0.001, dead_letters=DONE)
            await (await group.pool(handle_batch=handle, retry=retry)).run()
            assert handled == {b"%d" % number for number in range(10) if number != 3}
            assert [stored.letter.data async for stored in client.dead_letters(DONE).list()] == [b"3"]

    run(test())


def test_what_a_handler_sets_in_its_context_is_not_seen_by_the_next() -> None:
    async def test() -> None:
        seen: list[bytes | None] = []
        variable: ContextVar[bytes | None] = ContextVar("variable", default=None)

        async def handle(event: rg.Event[bytes]) -> None:
            seen.append(variable.get())
            variable.set(event.raw)

        async with aio.connect("memory://") as client:
            group = await billing(client, 10)
            await (await group.pool(handle, concurrency=2)).run()
        assert seen == [None] * 10

    run(test())


def test_closing_the_client_drains_while_handlers_still_use_it() -> None:
    async def test() -> None:
        begun, ended = Counter[bytes](), Counter[bytes]()
        client = await aio.connect("memory://")

        async def handle(event: rg.Event[bytes]) -> None:
            begun[event.raw] += 1
            async with client.lock("till"):
                await asyncio.sleep(pause(len(ended)) / 5)
            ended[event.raw] += 1

        group = await billing(client, 1000)
        pool = await group.pool(handle, concurrency=8)
        running = asyncio.create_task(pool.run())
        await until(lambda: len(ended) >= 5)
        await client.close()
        assert begun == ended and ended.total() < 1000
        await running

    run(test())
    wait_until(lambda: not [each for each in threading.enumerate() if "worker" in each.name or "pool" in each.name])


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("is_busy", [True, False])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_pool_whose_loop_has_ended_leaves_its_group(concurrency: int, is_busy: bool, is_closed: bool) -> None:
    store = rg.connect("memory://").store
    seen: list[bytes] = []
    left: list[aio.Client] = []

    async def leave_it_open() -> None:
        client = aio.Client(store)
        left.append(client)

        async def handle(event: rg.Event[bytes]) -> None:
            seen.append(event.raw)
            await asyncio.sleep(1000)

        group = await billing(client, 10 * is_busy, seal=False)
        await (await group.pool(handle, concurrency=concurrency)).__aenter__()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not seen if is_busy else await in_group(group) == 0:
                await asyncio.sleep(0.01)

    run(leave_it_open())
    if is_closed:
        run(left[0].close())
    with rg.Client(store) as client:
        group = client.groups.get("billing")
        wait_until(lambda: not group.distribution().readers)
        client.streams.seal(STREAM)
        with group.reader() as reader:
            assert sorted(int(event.raw) for event in reader) == list(range(10 * is_busy))


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="tasks are never eager here")
def test_tasks_may_be_eager() -> None:
    async def test() -> None:
        seen: list[bytes] = []

        async def handle(event: rg.Event[bytes]) -> None:
            seen.append(event.raw)
            if len(seen) % 2:
                await asyncio.sleep(0)

        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        async with aio.connect("memory://") as client:
            group = await billing(client, 200)
            async with group.pool(handle, concurrency=4) as pool:
                await pool.join()
        assert len(seen) == 200

    run(test())


INTERRUPTED = """
import asyncio, sys
from readergroup import aio

async def main():
    async with aio.connect(sys.argv[1]) as client:
        group = await client.groups.get("billing")

        async def handle(event):
            print("begun", event.raw.decode(), flush=True)
            await asyncio.sleep(0.05 if int(event.raw) < 50 else 1.0)  # the last ones not before the interrupt
            print("ended", event.raw.decode(), flush=True)

        async with group.pool(handle, concurrency=8) as pool:
            await pool.join()

asyncio.run(main())
"""


def test_ctrl_c_drains(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"

    async def prepare() -> None:
        async with aio.connect(url) as client:
            await billing(client, 1000)

    run(prepare())
    said = tmp_path / "said"
    with said.open("w") as output:
        command = [sys.executable, "-c", INTERRUPTED, url]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: said.read_text().count("ended") >= 5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    words = [line.split() for line in said.read_text().splitlines()]
    begun, ended = ([number for what, number in words if what == each] for each in ("begun", "ended"))
    assert sorted(begun) == sorted(ended) and len(begun) < 1000
    assert process.returncode == -signal.SIGINT and errors.rstrip().endswith("KeyboardInterrupt")
    with rg.connect(url) as client:
        group = client.groups.get("billing")
        assert group.distribution().readers == {}
        with group.reader() as reader:
            assert not {event.raw.decode() for event in reader} & {*begun}


def test_an_interrupt_in_a_handler_ends_the_loop() -> None:
    async def handle(event: rg.Event[bytes]) -> None:
        raise KeyboardInterrupt

    async def test() -> None:
        async with aio.connect("memory://") as client:
            group = await billing(client, 1)
            async with group.pool(handle, concurrency=2) as pool:
                await pool.join()

    with pytest.raises(KeyboardInterrupt):
        run(test())


# ---------------------------------------------------------------------- scale, and what is refused


def test_a_policy_sets_the_number_of_workers() -> None:
    async def test() -> None:
        goes_on = asyncio.Event()

        async def handle(event: rg.Event[bytes]) -> None:
            await goes_on.wait()

        async with aio.connect("memory://") as client:
            group = await billing(client, 100, segments=3)
            policy = rg.ReaderScalingPolicy(min_readers=1, max_readers=3, target_lag_seconds=0.01, cooldown_seconds=0.1)
            async with group.pool(handle, readers=policy) as pool:
                await until(lambda: len(pool.workers) == 3)
                assert pool.desired_readers == 3
                goes_on.set()
                await pool.join()
            assert pool.workers == ()

    run(test())


def test_the_loop_turns_while_the_store_hangs() -> None:
    async def test() -> None:
        store, seen = HangingStore(), list[bytes]()

        async def handle(event: rg.Event[bytes]) -> None:
            seen.append(event.raw)
            await asyncio.sleep(0)

        async with aio.Client(store, timeout=1000) as client:
            group = await billing(client, 100, seal=False)
            async with group.pool(handle, concurrency=8):
                await until(lambda: seen)
                with store.hangs():
                    await until(lambda: store.hanging)
                    for _ in range(100):  # the loop would not get here
                        await asyncio.sleep(0.001)
                await until(lambda: len(seen) == 100)

    run(test())


def test_a_pool_without_a_thread_begins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    async def test() -> None:
        seen: list[bytes] = []

        async def handle(event: rg.Event[bytes]) -> None:
            seen.append(event.raw)

        async with aio.connect("memory://") as client:
            pool = await (await billing(client, 10)).pool(handle, concurrency=4)
            monkeypatch.setattr(threading, STARTS_A_THREAD, refuse)
            with pytest.raises(rg.StoreUnavailableError):
                async with pool:
                    pass
            monkeypatch.undo()
            async with pool:
                await pool.join()
        assert len(seen) == 10

    run(test())


def test_a_pool_works_once_and_says_what_is_wrong() -> None:
    async def handle(event: rg.Event[bytes]) -> None: ...

    async def handle_two(event: object, connection: object) -> None: ...

    async def test() -> None:
        async with aio.connect("memory://") as client:
            group = await billing(client, 1)
            with pytest.raises(rg.InvalidArgumentError, match=r"called as handle\(event\)"):
                await group.pool(handle_two)  # type: ignore[call-overload]
            with pytest.raises(rg.InvalidArgumentError, match=r"called as handler\(event\)"):
                await client.event_processor("queue", handle_two)  # type: ignore[arg-type]
            pool = await group.pool(handle)
            with pytest.raises(rg.InvalidArgumentError, match="does not run"):
                await pool.join()
            for timeout in (-1, float("nan"), "5", True, None):
                with pytest.raises(rg.InvalidArgumentError):
                    await pool.run(timeout)  # type: ignore[arg-type]
            await pool.run()
            with pytest.raises(rg.InvalidArgumentError, match="only once"):
                await pool.run()
            with pytest.raises(rg.InvalidArgumentError, match="only once"):
                async with pool:
                    pass
            for options in (
                {}, {"handle": handle, "handle_batch": handle}, {"handle": 5}, {"handle": handle, "workers": "tasks"},
                {"handle": handle, "concurrency": 0}, {"handle": handle, "order": "nonsense"},
                {"handle": print, "handler_timeout_seconds": 1}, {"handle": handle, "retry": "often"},
            ):  # fmt: skip
                with pytest.raises(rg.InvalidArgumentError):
                    await group.pool(**options)  # type: ignore[call-overload]
            left = await group.pool(handle)
            await left.close()  # it never worked
        with pytest.raises(rg.ClosedError):
            await group.pool(handle)
        with pytest.raises(rg.ClosedError):
            await left.run()

    run(test())
