"""Locks, elections, memberships and barriers on the event loop: a cancelled wait leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

import readergroup as rg
from readergroup import aio
from tests.readergroup.aio.loops import HangingStore, run, until

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.stores(round_robin=True)
def test_a_lock_has_one_holder_and_serves_waiting_tasks_in_order(store_url: str) -> None:
    async def test() -> None:
        async with aio.connect(store_url) as client:
            served: list[int] = []
            tokens: list[int] = []

            async def work(number: int) -> None:
                async with client.lock("lock", timeout=100) as held:
                    held.check()
                    served.append(number)
                    tokens.append(held.fencing_token)
                    await asyncio.sleep(0)
                    assert served[-1] == number

            async with asyncio.TaskGroup() as tasks:
                for number in range(50):
                    tasks.create_task(work(number))
            assert served == list(range(50))
            assert tokens == sorted({*tokens})

    run(test())


def test_more_tasks_wait_for_locks_than_there_are_threads() -> None:
    """A holder that releases its lock needs a thread, too."""

    async def test() -> None:
        async with aio.connect("memory://") as client:
            async with asyncio.TaskGroup() as tasks:
                for number in range(120):
                    tasks.create_task(self_contained(client, f"lock-{number % 40}"))
                await asyncio.sleep(0.1)
            assert threading.active_count() < 400

    async def self_contained(client: aio.Client, name: str) -> None:
        async with client.lock(name, timeout=1000):
            await (await client.counter("done")).add(1)

    run(test())


def test_a_task_that_waits_for_the_store_to_open_a_lock_gives_up_in_time() -> None:
    """Also behind a task that has more time."""

    async def test() -> None:
        store = HangingStore()
        async with aio.Client(store) as client:
            with store.hangs():
                first = asyncio.create_task(hold(client, 1000))
                await until(lambda: store.hanging)
                with pytest.raises(rg.DeadlineExceededError, match="to open the lock"):
                    await hold(client, 0.05)
            await first
            await hold(client, 0.05)

    async def hold(client: aio.Client, timeout: float) -> None:
        async with client.lock("lock", timeout=timeout):
            pass

    run(test())


def test_a_cancelled_wait_for_a_lock_leaves_nothing_behind() -> None:
    async def test() -> None:
        store = HangingStore()
        async with aio.Client(store) as client, aio.Client(store.inner) as other:
            async with other.lock("lock"):
                for pause in (0, 0, 0.001, 0.01, 0.05):
                    waiting = asyncio.create_task(hold(client))
                    await asyncio.sleep(pause)
                    waiting.cancel()
                    await asyncio.wait([waiting])
                with pytest.raises(rg.DeadlineExceededError, match="other participants"):
                    async with client.lock("lock", timeout=0.05):
                        pass
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05), client.lock("lock"):
                        pass
            lock = other._sync._lock(rg.Lock, "lock", timeout=10.0, member_timeout_seconds=10.0)
            await until(lambda: not lock.synchronizer.fetch_updates().members)

    async def hold(client: aio.Client) -> None:
        async with client.lock("lock", timeout=1000):
            raise AssertionError

    run(test())


def test_a_cancelled_holder_releases_its_lock_at_once() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            holding = asyncio.Event()

            async def hold() -> None:
                async with client.lock("lock", member_timeout_seconds=1000):
                    holding.set()
                    await asyncio.sleep(1000)

            holder = asyncio.create_task(hold())
            await holding.wait()
            holder.cancel()
            async with client.lock("lock", member_timeout_seconds=1000, timeout=100) as held:
                await asyncio.wait([holder])  # the release has ended; its task may go on only now
                assert holder.cancelled()
                await held.release()
                await held.release()
                with pytest.raises(rg.LeaseLostError):
                    held.check()
                async with client.lock("lock", member_timeout_seconds=1000):  # the same task, after the release
                    with pytest.raises(rg.InvalidArgumentError, match="this task already holds"):
                        async with client.lock("lock", member_timeout_seconds=1000):
                            pass

    run(test())


def test_a_semaphore_has_as_many_holders_as_permits() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            holding, most = 0, 0

            async def work() -> None:
                nonlocal holding, most
                async with client.semaphore("semaphore", permits=3, timeout=100):
                    holding += 1
                    most = max(most, holding)
                    await until(lambda: most == 3)
                    await asyncio.sleep(0)
                    holding -= 1

            await asyncio.gather(*(work() for _ in range(20)))
            assert most == 3
            with pytest.raises(rg.InvalidArgumentError):
                async with client.semaphore("semaphore", permits=4):
                    pass

    run(test())


@pytest.mark.stores(round_robin=True)
def test_a_campaign_waits_for_the_election(store_url: str) -> None:
    async def test() -> None:
        async with aio.connect(store_url) as client:
            first = await client.leader_election("election", "first")
            second = await client.leader_election("election", "second")
            told: list[str] = []

            async def on_elected(token: int) -> None:
                assert threading.current_thread() is threading.main_thread()
                told.append(f"elected {token == second.fencing_token}")

            await second.on_elected(on_elected)
            await second.on_lost(lambda: told.append("lost"))
            assert await first.campaign(timeout=100)
            campaign = asyncio.create_task(second.campaign())
            await until(lambda: second.is_candidate)
            assert await second.leader() == "first" and not campaign.done()
            leaders = second.observe()
            assert await anext(leaders) == "first"
            await first.resign()
            assert await campaign and second.is_leader
            assert await anext(leaders) == "second"
            await until(lambda: told == ["elected True"])
            await second.close()
            await until(lambda: told == ["elected True", "lost"])

    run(test())


def test_a_cancelled_campaign_withdraws() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            leader = await client.leader_election("election", "leader")
            await leader.campaign()
            follower = await client.leader_election("election", "follower")
            for pause in (0, 0.001, 0.01, 0.05):
                campaign = asyncio.create_task(follower.campaign())
                await asyncio.sleep(pause)
                campaign.cancel()
                await asyncio.wait([campaign])
                await until(lambda: not follower.is_candidate)
            with pytest.raises(rg.DeadlineExceededError):
                await follower.campaign(timeout=0.05)
            await until(lambda: not follower.is_candidate)
            assert not await follower.campaign(wait=False)  # from now on it takes part, also after this:
            waiting = asyncio.create_task(follower.campaign())
            await asyncio.sleep(0.02)
            waiting.cancel()
            await asyncio.wait([waiting])
            waiting = asyncio.create_task(follower.campaign())
            await leader.resign()
            assert await waiting

    run(test())


@pytest.mark.stores(round_robin=True)
def test_a_barrier_lets_all_parties_pass_together(store_url: str) -> None:
    async def test() -> None:
        async with aio.connect(store_url) as client:
            barrier = await client.barrier("barrier", 5)
            for _ in range(3):
                arrivals = await asyncio.gather(*(barrier.wait(timeout=100) for _ in range(5)))
                assert sorted(arrivals) == [0, 1, 2, 3, 4]
            assert await barrier.n_waiting == 0
            with pytest.raises(rg.DeadlineExceededError):
                await barrier.wait(timeout=0.05)

    run(test())


def test_a_cancelled_party_breaks_the_round() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            barrier = await client.barrier("barrier", 3)
            others = [asyncio.create_task(barrier.wait(timeout=1000)) for _ in range(2)]
            await asyncio.sleep(0.02)
            while await barrier.n_waiting < 2:
                await asyncio.sleep(0.01)
            others[0].cancel()
            with pytest.raises(rg.BrokenBarrierError):
                await others[1]
            assert sorted(await asyncio.gather(*(barrier.wait(timeout=100) for _ in range(3)))) == [0, 1, 2]

    run(test())


def test_a_membership_joins_and_tells_its_listeners() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            told: list[str] = []

            async def on_joined(member: str) -> None:
                told.append(member)

            async with client.membership("members", "a") as membership:
                await membership.on_joined(on_joined)
                assert membership.is_member
                async with client.membership("members", "b"):
                    assert await membership.members() == ["a", "b"]
                    await until(lambda: told == ["b"])
                other = await client.membership("members", "c")
                joining = asyncio.create_task(other.join())
                await asyncio.sleep(0)
                joining.cancel()
                await asyncio.wait([joining])
                while await membership.members() != ["a"]:
                    await asyncio.sleep(0.01)

    run(test())


def test_a_cancelled_call_takes_nothing_from_another_task() -> None:
    async def test() -> None:
        store = HangingStore()
        async with aio.Client(store) as client:
            membership = await client.membership("workers", "a")
            with store.hangs():
                first, second = asyncio.create_task(membership.join()), asyncio.create_task(membership.join())
                await until(lambda: store.hanging)
                first.cancel()
                await asyncio.wait([first])
            await second
            await membership.members()  # runs after what the cancellation has sent
            await membership._thread.call(lambda: None)
            assert membership.is_member

            async with client.leader_election("election", "a") as leader, client.leader_election("election", "b") as b:
                await leader.campaign()
                campaigns = [asyncio.create_task(b.campaign(timeout=timeout)) for timeout in (None, 0.05, None)]
                await until(lambda: b.is_candidate)
                campaigns[0].cancel()
                with pytest.raises(rg.DeadlineExceededError):
                    await campaigns[1]
                await b._thread.call(lambda: None)
                assert b.is_candidate
                await leader.resign()
                assert await campaigns[2]

    run(test())


def test_what_two_cancelled_calls_began_is_undone() -> None:
    async def test() -> None:
        store = HangingStore()
        async with aio.Client(store) as client:
            membership = await client.membership("workers", "a")
            with store.hangs():
                joining = [asyncio.create_task(membership.join()) for _ in range(2)]
                await until(lambda: store.hanging)
                for task in joining:
                    task.cancel()
                await asyncio.wait(joining)
            await membership._thread.call(lambda: None)
            assert not membership.is_member

    run(test())


def test_a_call_that_is_cancelled_after_a_withdrawal_is_undone() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            membership = await client.membership("workers", "a")
            await membership.join()
            join, has_joined, may_return = membership._wrapped.join, threading.Event(), threading.Event()

            def join_slowly(**options: float | None) -> None:
                join(**options)
                has_joined.set()
                may_return.wait()

            membership._wrapped.join = join_slowly  # type: ignore[method-assign]
            leaving = asyncio.create_task(membership.leave())
            joining = asyncio.create_task(membership.join())
            await leaving
            await until(has_joined.is_set)
            joining.cancel()
            await asyncio.wait([joining])
            may_return.set()
            await membership._thread.call(lambda: None)
            assert not membership.is_member

            async with client.leader_election("election", "a") as leader, client.leader_election("election", "b") as b:
                await leader.campaign()
                first = asyncio.create_task(b.campaign())
                await until(lambda: b.is_candidate)
                await b.campaign(wait=False)
                resigning, second = asyncio.create_task(b.resign()), asyncio.create_task(b.campaign())
                await resigning
                await until(lambda: b.is_candidate)
                for task in first, second:
                    task.cancel()
                await asyncio.wait([first, second])
                await b._thread.call(lambda: None)
                assert not b.is_candidate

    run(test())
