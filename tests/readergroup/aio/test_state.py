"""Shared state, queues, notifications, groups and bulk reads on the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from pydantic import BaseModel

import readergroup as rg
from readergroup import aio
from readergroup.aio.listeners import awaited_on_loop
from synchronizer.testing import FailingStore
from tests.readergroup.aio.loops import STREAM, HangingStore, fill, run, until

pytestmark = pytest.mark.filterwarnings("error")


class Visits(rg.State):
    value: int = 0


class Add(rg.Update[Visits], tag="add"):
    amount: int = 1

    def apply_to(self, state: Visits, revision: rg.Revision) -> Visits:
        return state.replace(value=state.value + self.amount)


class Settings(BaseModel):
    size: int = 0


async def visits(client: aio.Client) -> aio.StateSynchronizer[Visits]:
    return await client.synchronizer("visits", initial=Visits(), updates=[Add])


@pytest.mark.stores(round_robin=True)
def test_a_state_is_changed_awaited_and_watched(store_url: str) -> None:
    async def test() -> None:
        async with aio.connect(store_url) as client:
            state = await visits(client)
            waiting = asyncio.create_task(state.wait_for(lambda state: state.value > 9, timeout=100))
            watched = state.watch()
            assert (await anext(watched)).value == 0
            for _ in range(10):
                await state.update_state(lambda state: [Add()])
            assert (await waiting).value == 10
            assert await state.update_state_returning(lambda state: ([Add()], state.value)) == 10
            while (await anext(watched)).value < 11:
                pass
            assert (await state.update_state_unconditionally(Add(), Add(amount=7))).value == state.state.value == 19
            assert (await state.fetch_updates()).value == 19
            with pytest.raises(rg.DeadlineExceededError):
                await state.wait_for(lambda state: False, timeout=0.02)
            with pytest.raises(ZeroDivisionError):
                await state.wait_for(lambda state: 1 / 0 > 1)
            with pytest.raises(rg.InvalidArgumentError):
                await state.wait_for(5)  # type: ignore[arg-type]
            await state.close()
            assert [each.value async for each in watched] in ([], [19])

    run(test())


def test_many_tasks_wait_for_a_state_in_one_thread() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            state = await visits(client)
            waits = [
                asyncio.create_task(state.wait_for(lambda state, n=n: state.value > n, timeout=1000))  # type: ignore[misc]
                for n in range(200)
            ]
            await until(lambda: state._changes._users == 200 and state._changes._stop)
            assert len([t for t in threading.enumerate() if t.name.startswith("updates of state/visits")]) == 1
            for _ in range(200):
                await state.update_state(lambda state: [Add()])
            await asyncio.gather(*waits)
            await until(lambda: not [t for t in threading.enumerate() if t.name.startswith("updates of state/visits")])

    run(test())


def test_collections_read_the_copy_and_await_changes() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            heard: list[object] = []

            async def hear(change: object) -> None:
                assert threading.current_thread() is threading.main_thread()
                heard.append(change)

            prices = await client.shared_map("prices", int)
            stop = await prices.register_listener(hear, key="a")
            await prices.put("a", 1)
            await prices.update({"b": 2, "c": 3})
            assert dict(prices) == prices.copy() == {"a": 1, "b": 2, "c": 3} and prices["b"] == 2 and len(prices) == 3
            assert not await prices.put_if_absent("a", 5) and await prices.replace("a", 6, 1)
            assert await prices.pop("a") == 6 and await prices.pop("a", None) is None
            assert await prices.setdefault("d", 4) == 4 and await prices.popitem() == ("b", 2)
            with pytest.raises(KeyError):
                await prices.pop("a")
            await until(lambda: len(heard) == 3)
            await stop()

            names = await client.shared_set("names", str)
            assert await names.add("a") and not await names.add("a") and await names.discard("a")
            await names.update(["x", "y"])
            assert names == {"x", "y"} and names & {"x"} == {"x"}

            counter = await client.counter("counter")
            assert await counter.add(5) == 5 == counter.value
            async for value in counter.watch():
                assert value == 5
                break

            config = await client.shared_config("config", Settings)
            await config.put("size", 3)
            assert config.value.size == 3

    run(test())


def test_a_queue_is_handled_by_a_coroutine_on_the_loop() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            handled: list[bytes] = []

            async def handle(event: rg.QueuedEvent) -> None:
                assert threading.current_thread() is threading.main_thread()
                await asyncio.sleep(0)
                handled.append(event.data)

            async with client.event_processor("mails", handle) as processor, client.event_queue("mails") as queue:
                await queue.add_many([b"%d" % number for number in range(20)])
                await processor.drain(timeout=100)
                assert handled == [b"%d" % number for number in range(20)]
                assert processor.processed_events == 20 and await queue.outstanding_bytes == 0
                assert [letter async for letter in queue.dead_letters()] == []

    run(test())


@pytest.mark.stores(round_robin=True)
def test_notifications_are_iterated_awaited_and_heard(store_url: str) -> None:
    async def test() -> None:
        async with aio.connect(store_url) as client:
            await fill(client, 0, segments=2)
            group = await client.groups.create("billing", streams=[STREAM], refresh_interval_seconds=0.1)
            notifier = group.segment_notifier
            assert (await notifier.wait(timeout=100)).number_of_segments == 2
            heard: list[int] = []

            async def hear(notification: rg.SegmentNotification) -> None:
                assert threading.current_thread() is threading.main_thread()
                heard.append(notification.number_of_segments)

            unregister = await notifier.register_listener(hear)
            waiting = asyncio.create_task(notifier.wait(timeout=100))
            cancelled = asyncio.create_task(notifier.wait(timeout=100))
            await asyncio.sleep(0.01)
            cancelled.cancel()
            iterated: list[int] = []
            async for notification in notifier:
                iterated.append(notification.number_of_segments)
                if notification.number_of_segments == 3:
                    break
                await client.streams.scale(STREAM, split=[0])
            assert iterated == [2, 3]
            assert (await waiting).number_of_segments == 3
            await until(lambda: heard == [2, 3])
            await unregister()
            with pytest.raises(rg.DeadlineExceededError):
                await notifier.wait(timeout=0.01)
            ending = asyncio.create_task(notifier.wait(timeout=1000))
            await asyncio.sleep(0.01)
            await notifier.unregister_all_listeners()
            with pytest.raises(rg.ClosedError):
                await ending
            await notifier.register_listener(hear)
            await notifier.unregister_listener(hear)
            with pytest.raises(rg.InvalidArgumentError):
                await notifier.register_listener(5)  # type: ignore[arg-type]

    run(test())


def test_what_cannot_be_a_listener_is_neither_registered_nor_unregistered() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 0)
            notifier = (await client.groups.create("billing", streams=[STREAM])).segment_notifier

            async def takes_two(notification: rg.SegmentNotification, gap: bool) -> None: ...

            for listener in (takes_two, lambda: None):
                with pytest.raises(rg.InvalidArgumentError, match=r"called as listener\(notification\)"):
                    await notifier.register_listener(listener)  # type: ignore[arg-type]
            unregister = await notifier.register_listener(print)
            with pytest.raises(rg.InvalidArgumentError, match="call it if register_listener returned it"):
                await notifier.unregister_listener(unregister)  # type: ignore[arg-type]
            assert notifier._wrapped._subscriptions
            await unregister()
            await notifier.unregister_listener(print)

    run(test())


def test_a_coroutine_that_a_plain_listener_returns_runs_on_the_loop_of_its_registration() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 0, segments=2)
            group = await client.groups.create("billing", streams=[STREAM])
            notifier = group.segment_notifier
            heard: list[tuple[int, threading.Thread]] = []

            async def hear(notification: rg.SegmentNotification) -> None:
                heard.append((notification.number_of_segments, threading.current_thread()))

            def listener(notification: rg.SegmentNotification) -> object:
                return hear(notification)

            unregister = await notifier.register_listener(listener)
            await notifier.register_listener(listener)  # changes nothing
            await until(lambda: heard)
            assert heard == [(2, threading.main_thread())]
            await notifier.unregister_listener(listener)
            assert not notifier._wrapped._subscriptions
            await unregister()
            assert notifier.listener_failures == 0

    run(test())


def test_a_plain_listener_runs_in_a_thread_and_must_not_return_a_generator() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 0, segments=2)
            group = await client.groups.create("billing", streams=[STREAM])
            notifier = group.segment_notifier
            heard: list[threading.Thread] = []
            await notifier.register_listener(lambda _: heard.append(threading.current_thread()))
            await until(lambda: heard)
            assert heard[0] is not threading.main_thread()
            await notifier.register_listener(lambda _: (each for each in heard))
            await until(lambda: notifier.listener_failures == 1)

    run(test())


def test_a_coroutine_that_a_listener_returns_after_the_end_of_its_loop_is_closed() -> None:
    async def hear(number: int) -> None:
        raise AssertionError("the loop never runs it")

    async def registered() -> Callable[[int], object]:
        return awaited_on_loop(lambda number: hear(number))

    listener = run(registered())
    with pytest.raises(rg.ClosedError):
        listener(1)
    gc.collect()  # Python warns of a coroutine that was never awaited then


def test_groups_and_bulk_reads_have_their_names_and_are_awaited() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 2500, segments=2)
            assert await client.streams.exists(STREAM)
            assert [name async for name in client.streams.list()] == [STREAM]
            group = await client.groups.create("billing", streams=[STREAM])
            assert [name async for name in client.groups.list()] == ["billing"]
            assert (await client.groups.get("billing")).name == "billing"
            assert (await group.lag()).segments
            checkpoint = await group.checkpoint("empty", timeout=100)
            assert await group.checkpoints == {"empty": checkpoint}
            assert (
                (await group.configure(reader_timeout_seconds=5)).reader_timeout_seconds
                == 5
                == (group.config.reader_timeout_seconds)
            )
            await group.reset("tail")
            assert await group.online_readers() == [] and (await group.distribution()).unassigned
            ranges = await client.batch.segment_ranges(STREAM)
            read = [int(event.data) for each in ranges async for event in client.batch.read(each)]
            assert sorted(read) == list(range(2500))
            batches = [batch async for batch in client.batch.batches(ranges[0], max_events=100)]
            assert sum(map(len, batches)) == await client.batch.count(ranges[0])
            await client.groups.delete("billing")
            with pytest.raises(rg.NotFoundError):
                await client.groups.get("billing")

    run(test())


def test_a_cancelled_step_of_an_iteration_loses_no_item() -> None:
    async def test() -> None:
        store = HangingStore()
        async with aio.Client(store) as client:
            await fill(client, 3000)
            (part,) = await client.batch.segment_ranges(STREAM)
            events = client.batch.read(part)
            with store.hangs():
                step = asyncio.create_task(anext(events))  # type: ignore[arg-type]
                await until(lambda: store.hanging)
                step.cancel()
                await asyncio.wait([step])
            assert [int(event.data) async for event in events] == list(range(3000))

    run(test())


def _each_awaited_call(client: aio.Client) -> list[Callable[[], object]]:
    return [
        lambda: client.streams.create("no/stream/name"),
        lambda: client.streams.info("shop/none"),
        lambda: client.counter("bad name!"),
        lambda: client.barrier("barrier", 0),
        lambda: client.groups.create("billing", streams=["shop/none"]),
        lambda: client.event_processor("queue", None),
        lambda: client.writer(5),  # type: ignore[call-overload]
    ]


def test_bad_arguments_raise_our_errors() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            for call in _each_awaited_call(client):
                with pytest.raises(rg.ReaderGroupError):
                    await call()  # type: ignore[misc]
            for timeout in (-1, "5", float("nan"), True):
                with pytest.raises(rg.InvalidArgumentError):
                    async with client.lock("lock", timeout=timeout):  # type: ignore[arg-type]
                        pass
                with pytest.raises(rg.InvalidArgumentError):
                    await (await client.barrier("barrier", 2)).wait(timeout=timeout)  # type: ignore[arg-type]

    run(test())


def test_one_who_waits_for_a_notification_that_another_takes_waits_no_longer_than_it_said() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await client.streams.create(STREAM)
            group = await client.groups.create("billing", streams=[STREAM])
            await group.reader_notifier.wait()  # the present value

            async def take_all() -> None:
                while True:
                    await group.reader_notifier.wait(timeout=1000)

            taking = asyncio.create_task(take_all())
            await asyncio.sleep(0)
            begun = asyncio.get_running_loop().time()
            waiting = asyncio.create_task(group.reader_notifier.wait(timeout=0.5))
            while not waiting.done() and asyncio.get_running_loop().time() < begun + 5:
                async with group.reader():
                    await asyncio.wait([waiting], timeout=0.1)
            assert waiting.done()
            with suppress(rg.DeadlineExceededError):  # or it has heard of one
                waiting.result()
            taking.cancel()

    run(test())


def test_an_idle_watcher_of_a_client_without_patience_leaves_the_store_in_peace() -> None:
    async def test() -> None:
        store = FailingStore(rg.connect("memory://").store)
        async with aio.Client(store, timeout=0) as client:
            prices = await client.shared_map("prices", int)
            watching = prices.watch()
            await anext(watching)
            change = asyncio.ensure_future(anext(watching))
            await asyncio.sleep(0.1)
            before = len(store.operations)
            await asyncio.wait([change], timeout=0.5)
            assert len(store.operations) - before < 50
            await prices.put("tea", 1)
            assert await change == {"tea": 1}

    run(test())
