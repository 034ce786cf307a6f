from __future__ import annotations

import contextvars
import threading

import pytest

from synchronizer import (
    DeadlineExceededError,
    InvalidArgumentError,
    ManualClock,
    OutcomeUnknownError,
    StoreFullError,
    Update,
)
from synchronizer.testing import FailingStore, Operation
from tests.synchronizer.accounts import (
    LONG,
    Account,
    Add,
    Barrier,
    Put,
    Replica,
    Take,
    answer,
    failing,
    joined,
    opened,
    threads,
)
from tests.waiting import until


def test_calls_that_come_while_an_append_is_on_its_way_go_out_as_one() -> None:
    store = failing()
    replica = opened(store)
    appends = store.count("append")
    barrier = Barrier(store, "append")
    with threads(20) as pool:
        first = pool.submit(replica.update_state_unconditionally, Add())
        barrier.await_reached()
        others = [pool.submit(replica.update_state_unconditionally, Add()) for _ in range(19)]
        joined(replica, 19)
        barrier.release()
        values = sorted(answer(future).value for future in [first, *others])
    assert values == list(range(1, 21))
    assert store.count("append") - appends == 2
    assert opened(store.inner).state.value == 20


def test_each_is_an_entry_of_its_own() -> None:
    store = failing()
    replica = opened(store)
    feed = replica.transitions()
    feed.drain()
    barrier = Barrier(store, "append")
    with threads(5) as pool:
        calls = [pool.submit(replica.update_state_unconditionally, Add(), Add())]
        barrier.await_reached()
        calls += [pool.submit(replica.update_state_unconditionally, Add(), Add()) for _ in range(4)]
        joined(replica, 4)
        barrier.release()
        for call in calls:
            answer(call)
    other = opened(store.inner)
    assert [len(transition.updates) for transition in feed.drain()] == [2] * 5
    assert (other.state, other.revision) == (replica.state, replica.revision)


def test_each_generator_runs_in_the_thread_and_context_of_its_caller() -> None:
    store = failing()
    replica = opened(store)
    caller: contextvars.ContextVar[int] = contextvars.ContextVar("caller")
    seen = []
    barrier = Barrier(store, "append")

    def call(number: int) -> None:
        caller.set(number)

        def generator(state: Account) -> list[Add]:
            seen.append((number, caller.get(), threading.get_ident()))
            return [Add()]

        mine = threading.get_ident()
        replica.update_state(generator)
        assert {thread for known, _, thread in seen if known == number} == {mine}

    with threads(4) as pool:
        calls = [pool.submit(contextvars.Context().run, call, 0)]
        barrier.await_reached()
        calls += [pool.submit(contextvars.Context().run, call, number) for number in range(1, 4)]
        joined(replica, 3)
        barrier.release()
        for future in calls:
            answer(future)
    assert all(number == known for number, known, _ in seen) and len(seen) == 4


def test_one_that_raises_is_left_out_of_the_batch() -> None:
    store = failing()
    replica = opened(store)
    barrier = Barrier(store, "append")
    with threads(3) as pool:
        first = pool.submit(replica.update_state_unconditionally, Add())
        barrier.await_reached()
        second = pool.submit(replica.update_state_unconditionally, Add())
        joined(replica, 1)
        refused = pool.submit(replica.update_state_unconditionally, Add(), Take(amount=1000))
        barrier.release()
        with pytest.raises(ValueError, match="only 3"):
            answer(refused)
        answer(first), answer(second)
    assert opened(store.inner).state.value == 2


def test_when_a_batch_loses_all_in_it_and_behind_it_decide_again() -> None:
    store = failing()
    replica, other = opened(store), opened(store.inner)
    barrier = Barrier(store, "append")
    asked: dict[int, list[int]] = {}

    def call(number: int) -> int:
        def generator(state: Account) -> list[Update[Account]]:
            asked.setdefault(number, []).append(state.value)
            return [Add(), Put(key=str(number), value=state.value)]

        return replica.update_state(generator).entries[str(number)]

    with threads(5) as pool:
        calls = [pool.submit(call, 0)]
        barrier.await_reached()
        calls += [pool.submit(call, number) for number in range(1, 5)]
        joined(replica, 4)
        other.update_state_unconditionally(Add(amount=100))
        barrier.release()
        values = sorted(answer(future) for future in calls)
    assert values == [100, 101, 102, 103, 104]
    assert all(seen[0] < 100 <= seen[-1] for seen in asked.values())
    assert other.fetch_updates() == replica.state and replica.state.value == 105


def test_a_generator_must_not_call_the_synchronizer() -> None:
    replica = opened(failing())
    for call in (
        replica.fetch_updates,
        replica.compact,
        replica.delete,
        lambda: replica.update_state_unconditionally(Add()),
        lambda: replica.wait_for_growth(0),
        lambda: replica.wait_for(lambda state: True),
    ):
        with pytest.raises(InvalidArgumentError, match="generator must not call"):
            replica.update_state(lambda state, call=call: call() or [])
    assert replica.update_state_unconditionally(Add()).value == 1


def test_a_generator_may_call_another_synchronizer_and_look_at_the_state() -> None:
    store = failing()
    replica, other = opened(store), opened(store, name="other")

    def generator(state: Account) -> list[Add]:
        assert replica.state.value == state.value
        return [Add(amount=other.update_state_unconditionally(Add(amount=5)).value)]

    assert replica.update_state(generator).value == 5


def test_nothing_to_do_waits_until_what_it_saw_is_stored() -> None:
    store = failing()
    replica = opened(store)
    barrier = Barrier(store, "append")
    with threads(2) as pool:
        first = pool.submit(replica.update_state_unconditionally, Add())
        barrier.await_reached()
        asked = threading.Semaphore(0)
        nothing = pool.submit(replica.update_state, lambda state: asked.release() or [])
        assert asked.acquire(timeout=LONG) and asked.acquire(timeout=LONG)  # before and after its fetch
        assert not nothing.done()
        barrier.release()
        answer(first)
        assert answer(nothing).value == 1


def test_a_failure_of_the_append_is_told_to_all_in_the_batch_and_those_behind_go_on() -> None:
    store = failing()
    replica = opened(store)
    barrier = Barrier(store, "append")
    full = 0

    def fail_the_second(operation: Operation) -> None:
        nonlocal full
        if operation.verb == "append":
            full += 1
            if full == 1:
                raise StoreFullError("the disk is full")

    with threads(4) as pool:
        first = pool.submit(replica.update_state_unconditionally, Add())
        barrier.await_reached()
        others = [pool.submit(replica.update_state_unconditionally, Add(amount=10)) for _ in range(3)]
        joined(replica, 3)
        store.before = fail_the_second
        barrier.release()
        answer(first)
        for future in others:
            with pytest.raises(StoreFullError):
                answer(future)
    assert replica.update_state_unconditionally(Add()).value == 2


class TestDeadlines:
    def test_a_caller_whose_deadline_comes_before_its_batch_is_sent_is_left_out(self) -> None:
        store, clock = failing(), ManualClock()
        replica = opened(store, clock=clock)
        barrier = Barrier(store, "append")
        with threads(3) as pool:
            first = pool.submit(replica.update_state_unconditionally, Add())
            barrier.await_reached()
            hasty = pool.submit(replica.update_state_unconditionally, Add(amount=10), timeout=1)
            patient = pool.submit(replica.update_state_unconditionally, Add(amount=100))
            joined(replica, 2)
            clock.advance(1)
            with pytest.raises(DeadlineExceededError):
                answer(hasty)
            barrier.release()
            answer(first), answer(patient)
        assert opened(store.inner).state.value == 101

    def test_a_caller_whose_deadline_comes_while_its_batch_is_on_its_way_does_not_know(self) -> None:
        store, clock = failing(), ManualClock()
        replica = opened(store, clock=clock)
        barrier = Barrier(store, "append")
        with threads(3) as pool:
            first = pool.submit(replica.update_state_unconditionally, Add())
            barrier.await_reached()
            batch = [pool.submit(replica.update_state_unconditionally, Add(), timeout=5) for _ in range(2)]
            joined(replica, 2)
            second = Barrier(store, "append")
            barrier.release()
            second.await_reached()
            clock.advance(5)
            # One of them sends, and learns from the store what the other one does not wait for.
            until(lambda: any(future.done() for future in batch), "the deadline of the one who does not send")
            second.release()
            errors = [future.exception(LONG) for future in batch]
            answer(first)
        assert sorted(str(type(error).__name__) for error in errors) == ["NoneType", "OutcomeUnknownError"]
        assert opened(store.inner).state.value == 3

    def test_the_deadline_of_the_one_who_sends_is_not_that_of_the_others(self) -> None:
        store, clock = failing(), ManualClock()
        replica = opened(store, clock=clock)
        barrier = Barrier(store, "append")
        with threads(2) as pool:
            hasty = pool.submit(replica.update_state_unconditionally, Add(), timeout=1)
            barrier.await_reached()
            patient = pool.submit(replica.update_state_unconditionally, Add(amount=10), timeout=100)
            joined(replica, 1)
            store.fail_appends()
            clock.advance(1)
            barrier.release()
            with pytest.raises(DeadlineExceededError):
                answer(hasty)
            assert answer(patient).value == 10
        assert opened(store.inner).state.value == 10

    @pytest.mark.parametrize("stored", [True, False])
    def test_after_a_lost_answer_another_caller_of_the_batch_finds_out(self, stored: bool) -> None:
        store, clock = failing(), ManualClock()
        replica = opened(store, clock=clock)
        barrier = Barrier(store, "append")
        with threads(4) as pool:
            first = pool.submit(replica.update_state_unconditionally, Add())
            barrier.await_reached()
            batch = [
                pool.submit(replica.update_state_unconditionally, Add(amount=10), timeout=timeout)
                for timeout in (1, 100)
            ]
            joined(replica, 2)
            second = Barrier(store, "append")
            barrier.release()
            second.await_reached()
            store.lose_answers() if stored else store.lose_requests()
            clock.advance(1)
            second.release()
            # Whoever of the two sends: the hasty one does not know, the patient one does.
            until(lambda: batch[0].done(), "the deadline of the hasty one")
            # Whenever the patient one begins to pause before it asks again.
            until(lambda: bool(clock.advance(0.1)) or batch[1].done(), "the end of its pauses")
            with pytest.raises(OutcomeUnknownError):
                answer(batch[0])
            assert answer(batch[1]).value in (11, 21)
            answer(first)
        assert opened(store.inner).state.value == 21

    def test_a_generator_that_does_not_return_holds_up_nobody_past_his_deadline(self) -> None:
        entered, released, asked = threading.Event(), threading.Event(), threading.Event()

        class Watched(ManualClock):
            def monotonic(self) -> float:
                now = super().monotonic()
                if entered.is_set():  # for the deadline of the call that waits
                    asked.set()
                return now

        store, clock = failing(), Watched()
        replica = opened(store, clock=clock)

        def generator(state: Account) -> list[Add]:
            entered.set()
            assert released.wait(LONG)
            return [Add()]

        with threads(2) as pool:
            slow = pool.submit(replica.update_state, generator)
            assert entered.wait(LONG)
            waiting = pool.submit(replica.update_state_unconditionally, Add(), timeout=5)
            assert asked.wait(LONG)
            opened(store.inner).update_state_unconditionally(Add(amount=10))
            assert replica.fetch_updates().value == 10  # reading is not held up at all
            assert replica.transitions().drain()
            clock.advance(5)
            with pytest.raises(DeadlineExceededError):
                answer(waiting)
            released.set()
            assert answer(slow).value == 11

    def test_a_batch_without_room_is_waited_for_until_the_deadline(self) -> None:
        store, clock = failing(), ManualClock()
        replica = opened(store, clock=clock, state_limit_bytes=1 << 30)
        barrier = Barrier(store, "append")
        large = "x" * 5_000_000
        with threads(3) as pool:
            first = pool.submit(replica.update_state_unconditionally, Add())
            barrier.await_reached()
            second = pool.submit(replica.update_state_unconditionally, Put(key=large, value=1))
            joined(replica, 1)
            third = pool.submit(replica.update_state_unconditionally, Put(key=large, value=2), timeout=5)
            until(lambda: replica._follower.barred_thread is not None, "the third call deciding")
            clock.advance(5)
            with pytest.raises(DeadlineExceededError):
                answer(third)
            barrier.release()
            answer(first)
            assert answer(second).entries[large] == 1
        assert replica.update_state_unconditionally(Put(key=large, value=3)).entries[large] == 3

    def test_an_interrupted_caller_leaves_nothing_behind_that_the_others_wait_for(self) -> None:
        """Of all who asked what became of a lost append, the last one goes: the next call starts afresh."""
        store = failing()
        replica = opened(store)
        store.lose_requests()
        lost = 0

        def interrupt_the_retry(operation: Operation) -> None:
            nonlocal lost
            lost += operation.verb == "append"
            if lost == 2:
                store.before = None
                raise KeyboardInterrupt

        store.before = interrupt_the_retry
        with pytest.raises(KeyboardInterrupt):
            replica.update_state_unconditionally(Add())
        assert replica.update_state_unconditionally(Add(amount=10), timeout=5).value == 10


def test_threads_that_update_at_once_need_far_fewer_appends() -> None:
    """On a store that takes a moment: here the moment is that another thread gets to run."""
    store = failing()
    replica = opened(store)
    pause = threading.Event()
    store.before = lambda operation: pause.wait(0.002) and None
    appends = store.count("append")

    together = threading.Barrier(16, timeout=LONG)

    def work() -> None:
        together.wait()
        for _ in range(20):
            replica.update_state_unconditionally(Add())

    with threads(16) as pool:
        for future in [pool.submit(work) for _ in range(16)]:
            answer(future)
    assert opened(store.inner).state.value == 320
    assert store.count("append") - appends < 100


def test_two_handles_in_one_process_are_two_contenders() -> None:
    store: FailingStore = failing()
    one, two = opened(store), opened(store)
    with threads(8) as pool:
        work = [pool.submit(_add_many, replica) for replica in (one, two) for _ in range(4)]
        for future in work:
            answer(future)
    assert one.fetch_updates() == two.fetch_updates() == Account(value=400)


def _add_many(replica: Replica) -> None:
    for _ in range(50):
        replica.update_state_unconditionally(Add())


def test_a_deadline_in_the_middle_of_a_crowd_disturbs_only_its_own_call() -> None:
    store = failing()
    replica = opened(store)
    outcomes: list[str] = []

    def work(number: int) -> None:
        for _ in range(20):
            try:
                replica.update_state_unconditionally(Add(), timeout=0 if number % 4 == 0 else None)
                outcomes.append("stored")
            except DeadlineExceededError:
                outcomes.append("not stored")
            except OutcomeUnknownError:
                outcomes.append("unknown")

    with threads(16) as pool:
        for future in [pool.submit(work, number) for number in range(16)]:
            answer(future)
    assert len(outcomes) == 320
    stored, unknown = outcomes.count("stored"), outcomes.count("unknown")
    assert stored <= opened(store.inner).state.value <= stored + unknown


def test_what_is_decided_beside_an_append_of_which_nothing_is_heard_is_decided_on_the_newest_state() -> None:
    store = failing()
    replica, other = opened(store), opened(store.inner)
    store.lose_answers()
    barrier = Barrier(store, "append", nth=2)  # the question what became of the first
    with threads(2) as pool:
        lost = pool.submit(replica.update_state_unconditionally, Add())
        barrier.await_reached()
        other.update_state_unconditionally(Add(amount=10))
        nothing = pool.submit(replica.update_state, lambda state: ())
        try:
            assert answer(nothing).value == 11
        finally:
            barrier.release()
        assert answer(lost).value == 1


def test_an_entry_is_decided_on_what_came_after_an_append_of_which_nothing_is_heard() -> None:
    store = failing()
    replica, other = opened(store), opened(store.inner)
    seen: list[int] = []
    barrier = Barrier(store, "append")
    with threads(3) as pool:
        held = pool.submit(replica.update_state_unconditionally, Add())
        barrier.await_reached()
        waiting = pool.submit(replica.update_state_unconditionally, Add(amount=2))
        joined(replica, 1)
        other.update_state_unconditionally(Add(amount=10))
        replica.fetch_updates()

        def add(state: Account) -> list[Add]:
            seen.append(state.value)
            return [Add(amount=100)]

        late = pool.submit(replica.update_state, add)
        until(lambda: bool(seen) and seen[0] >= 10, "the generator sees what the log holds")
        barrier.release()
        for each in (held, waiting, late):
            answer(each)
    assert opened(store.inner).state.value == replica.fetch_updates().value == 113
