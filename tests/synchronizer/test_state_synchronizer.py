from __future__ import annotations

import cProfile
import os
import pstats
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from synchronizer import (
    ANY,
    AttributeChange,
    ClosedError,
    CorruptStateError,
    DeadlineExceededError,
    InvalidArgumentError,
    ManualClock,
    NotFoundError,
    OutcomeUnknownError,
    Proposal,
    Revision,
    SegmentStore,
    State,
    StateSynchronizer,
    StateTooLargeError,
    StoreFullError,
    StoreUnavailableError,
    Transition,
    Update,
    open_store,
)
from synchronizer.log.contention import MAX_CONTENTION
from synchronizer.store import MAX_ATTRIBUTE_CHANGES, MAX_CREATED_BYTES
from synchronizer.testing import FailingStore, Operation
from tests.synchronizer.accounts import (
    LONG,
    UPDATES,
    Account,
    Add,
    Barrier,
    Note,
    Put,
    Take,
    answer,
    is_waited_on,
    joined,
    just_before,
    opened,
    stepwise,
    threads,
)
from tests.waiting import PATIENCE_SECONDS, busyness, until

pytestmark = pytest.mark.stores(round_robin=True)


@pytest.fixture
def store(store_url: str) -> Iterator[FailingStore]:
    with FailingStore(open_store(store_url)) as store:
        yield store


class TestOpening:
    def test_the_first_one_begins_the_state_and_the_others_find_it(self, store: FailingStore) -> None:
        assert opened(store).update_state_unconditionally(Add()).value == 1
        assert opened(store).state.value == 1
        found = StateSynchronizer(store, "account", state_type=Account, updates=UPDATES)
        assert found.state.value == 1

    def test_many_at_once_begin_it_once(self, store: FailingStore) -> None:
        with threads(8) as pool:
            replicas = [answer(f) for f in [pool.submit(opened, store) for _ in range(8)]]
        assert len({replica.applied_length for replica in replicas}) == 1

    def test_many_at_once_begin_it_once_where_the_store_creates_one_segment_at_a_time(
        self, store: FailingStore
    ) -> None:
        stepwise(store)
        with threads(8) as pool:
            replicas = [answer(f) for f in [pool.submit(opened, store) for _ in range(8)]]
        assert len({replica.applied_length for replica in replicas}) == 1
        assert store.count("create_together") == 0

    def test_it_begins_in_one_step_and_is_opened_without_a_write(self, store: FailingStore) -> None:
        opened(store)
        assert store.count("create_together") == 1
        opened(store)
        assert store.count("create_together") == 1
        assert store.count("create") + store.count("append") == 0

    def test_a_large_state_begins_in_more_steps(self, store: FailingStore) -> None:
        initial = Account(note="x" * MAX_CREATED_BYTES)
        began = StateSynchronizer(store, "account", initial=initial, updates=UPDATES)
        assert began.update_state_unconditionally(Add()).note == opened(store).state.note == initial.note

    def test_a_state_over_its_limit_is_not_begun(self, store: FailingStore) -> None:
        with pytest.raises(StateTooLargeError):
            StateSynchronizer(
                store, "account", initial=Account(note="x" * 2000), updates=UPDATES, state_limit_bytes=1000
            )
        with pytest.raises(NotFoundError):
            StateSynchronizer(store, "account", state_type=Account, updates=UPDATES)

    def test_without_a_beginning_a_name_that_was_never_used_is_not_found(self, store: FailingStore) -> None:
        with pytest.raises(NotFoundError):
            StateSynchronizer(store, "account", state_type=Account, updates=UPDATES)

    def test_it_needs_to_know_the_class_of_the_state(self, store: FailingStore) -> None:
        with pytest.raises(InvalidArgumentError, match="state_type"):
            StateSynchronizer(store, "account", updates=UPDATES)

    def test_the_initial_state_is_no_class(self, store: FailingStore) -> None:
        initial: Any = Account
        with pytest.raises(InvalidArgumentError, match="must be an instance of a State class"):
            StateSynchronizer(store, "account", initial=initial, updates=UPDATES)

    @pytest.mark.parametrize("name", ["", "a b", "a@b", "ä", "a" * 601, "a\n", "a/"])
    def test_names_that_cannot_be_are_refused(self, name: str, store: FailingStore) -> None:
        with pytest.raises(InvalidArgumentError):
            opened(store, name=name)

    def test_a_store_that_is_not_linearizable_is_refused(self, store: FailingStore) -> None:
        store.guarantees = type(store.guarantees)(
            durable=True,
            linearizable_append=False,
            linearizable_read=True,
            push=True,
            many_processes=True,
            many_hosts=True,
        )
        with pytest.raises(InvalidArgumentError, match="linearizable"):
            opened(store)

    def test_initialize_does_nothing_where_a_state_is(self, store: FailingStore) -> None:
        replica = opened(store)
        assert not replica.initialize(Account(value=5))
        assert replica.state.value == 0

    def test_two_given_the_same_rng_are_still_two_writers(self, store: FailingStore) -> None:
        one, two = (opened(s, rng=random.Random(1)) for s in (store, store.inner))
        assert one._writer._batcher._writer_id != two._writer._batcher._writer_id


class TestConditionalUpdates:
    def test_the_generator_is_asked_again_on_the_newer_state(self, store: FailingStore) -> None:
        one, two = opened(store), opened(store)
        one.update_state_unconditionally(Add(amount=5))
        asked = []

        def double(state: Account) -> list[Add]:
            asked.append(state.value)
            return [Add(amount=state.value)]

        assert two.update_state(double).value == 10
        assert asked in ([0, 5], [0, 0, 5])

    def test_all_updates_of_a_call_are_applied_or_none(self, store: FailingStore) -> None:
        replica = opened(store)
        with pytest.raises(ValueError, match="only 6"):
            replica.update_state_unconditionally(Add(amount=5), Add(amount=1), Take(amount=7))
        assert replica.fetch_updates().value == opened(store).state.value == 0
        assert replica.update_state_unconditionally(Add(amount=5), Take(amount=4)).value == 1
        assert replica.revision.index == 1

    def test_the_caller_gets_what_the_last_run_said(self, store: FailingStore) -> None:
        one, two = opened(store), opened(store)
        one.update_state_unconditionally(Add(amount=5))
        assert two.update_state_returning(lambda state: ([Add()], f"found {state.value}")) == "found 5"

    def test_a_generator_may_yield(self, store: FailingStore) -> None:
        def generator(state: Account) -> Any:
            yield Add()
            yield Add()

        assert opened(store).update_state(generator).value == 2

    def test_a_generator_that_returns_something_else_than_updates_is_told_so(self, store: FailingStore) -> None:
        class Nothing(Update[Account], tag="nothing"):
            def apply_to(self, state: Account, revision: Revision) -> Account:
                return state

        replica = opened(store)
        single: Any = Add()
        for found in (single, [single, "add"], Nothing(), None):
            with pytest.raises(InvalidArgumentError, match="in a list, or yield"):
                replica.update_state(lambda state, found=found: found)
            with pytest.raises(InvalidArgumentError, match="in a list, or yield"):
                replica.update_state_returning(lambda state, found=found: (found, None))
        with pytest.raises(InvalidArgumentError, match=r"each update as an argument of its own: found='list'"):
            replica.update_state_unconditionally([single])  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="each update as an argument of its own"):
            replica.update_state_unconditionally(single, "add")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="an instance of the update, not its class: found='the class"):
            replica.update_state_unconditionally(Nothing)  # type: ignore[arg-type]
        for of_class in (Nothing, [Nothing]):
            with pytest.raises(InvalidArgumentError, match="instances of updates, not their classes"):
                replica.update_state(lambda state, found=of_class: found)
        for changed in (replica.state, [replica.state]):
            with pytest.raises(InvalidArgumentError, match="return updates, not a state: found='Account'"):
                replica.update_state(lambda state, found=changed: found)
        assert replica.state.value == 0

    def test_an_async_generator_function_is_told_to_await_before(self, store: FailingStore) -> None:
        async def generator(state: Account) -> list[Update[Account]]:
            return []

        with pytest.raises(InvalidArgumentError, match="runs again after a lost race, so await before this call") as no:
            opened(store).update_state(generator)  # type: ignore[arg-type]
        assert "asyncio.run" not in str(no.value)

    def test_it_returns_the_state_that_its_own_updates_made(self, store: FailingStore) -> None:
        replica = opened(store)
        barrier = Barrier(store, "append")
        with threads(2) as pool:
            first = pool.submit(replica.update_state_unconditionally, Add())
            barrier.await_reached()
            second = pool.submit(replica.update_state_unconditionally, Add())
            until(lambda: replica._writer._batcher.open is not None, "the second call in the open batch")
            barrier.release()
            assert answer(first).value == 1
            assert answer(second).value == 2

    def test_an_error_on_an_old_state_is_decided_again_on_the_newest(self, store: FailingStore) -> None:
        one, two = opened(store), opened(store)
        one.update_state_unconditionally(Add(amount=5))
        assert two.update_state_unconditionally(Take(amount=5)).value == 0

    def test_one_that_is_to_return_more_than_updates_and_does_not_is_told_so(self, store: FailingStore) -> None:
        replica = opened(store)
        answers: list[Any] = [[], [Add()], None, 5]
        for found in answers:
            with pytest.raises(InvalidArgumentError, match="must return a pair"):
                replica.update_state_returning(lambda state, found=found: found)
            with pytest.raises(InvalidArgumentError, match="must return a Proposal"):
                replica.update_state_with_attributes(lambda state, found=found: found)
        assert replica.state.value == 0

    def test_what_the_generator_raises_on_the_newest_state_reaches_the_caller(self, store: FailingStore) -> None:
        one, two = opened(store), opened(store)
        one.update_state_unconditionally(Add(amount=5))
        seen = []

        def generator(state: Account) -> list[Add]:
            seen.append(state.value)
            raise LookupError(state.value)

        length = store.info("account").length
        with pytest.raises(LookupError, match="5"):
            two.update_state(generator)
        assert seen == [0, 5]
        assert store.info("account").length == length

    def test_a_call_of_too_many_updates_is_refused(self, store: FailingStore) -> None:
        replica = opened(store, state_limit_bytes=1 << 30)
        with pytest.raises(InvalidArgumentError, match="too large"):
            replica.update_state_unconditionally(Note(text="x" * 9_000_000))
        assert replica.update_state_unconditionally(Note(text="x" * 8_000_000)).note

    def test_an_update_in_the_log_that_cannot_be_applied_stops_the_replica(self, store: FailingStore) -> None:
        class Add2(Update[Account], tag="add"):
            amount: int = 1

            def apply_to(self, state: Account, revision: Revision) -> Account:
                raise NotFoundError("changed its mind since")

        changed = StateSynchronizer(store, "account", initial=Account(), updates=[Add2])
        opened(store).update_state_unconditionally(Add())
        for _ in range(2):
            with pytest.raises(CorruptStateError, match="cannot be applied"):
                changed.fetch_updates()

    def test_an_error_of_apply_to_is_the_callers_and_stops_nothing(self, store: FailingStore) -> None:
        class Refuse(Update[Account], tag="refuse"):
            def apply_to(self, state: Account, revision: Revision) -> Account:
                raise NotFoundError("not for you")

        replica = StateSynchronizer(store, "account", initial=Account(), updates=[Add, Refuse])
        with pytest.raises(NotFoundError, match="not for you"):
            replica.update_state_unconditionally(Refuse())
        assert replica.update_state_unconditionally(Add()).value == 1

    def test_revisions_are_those_that_apply_to_was_given(self, store: FailingStore) -> None:
        given = []

        class Count(Update[Account], tag="count"):
            def apply_to(self, state: Account, revision: Revision) -> Account:
                given.append(revision)
                return state.replace(value=revision.token)

        replica = StateSynchronizer(store, "account", initial=Account(), updates=[Count])
        replica.update_state_unconditionally(Count(), Count())
        assert given == [Revision(given[0].offset, 0), Revision(given[0].offset, 1)]
        assert replica.revision == given[-1] and replica.state.value == given[-1].token
        assert replica.snapshot_of_state == (replica.state, replica.revision)


class TestAttributes:
    def test_they_change_with_the_updates_or_not_at_all(self, store: FailingStore) -> None:
        replica = opened(store)
        lease = {"lease": AttributeChange(None, b"1")}
        assert replica.update_state_with_attributes(lambda state: Proposal([Add()], "done", lease)) == "done"
        assert store.attributes("account", "lease") == {"lease": b"1"}

    def test_the_generator_is_asked_again_when_one_is_not_as_expected(self, store: FailingStore) -> None:
        replica = opened(store)
        store.inner.append("account", b"", attributes={"lease": AttributeChange(None, b"1")})

        def renew() -> None:
            store.inner.append("account", b"", attributes={"lease": AttributeChange(ANY, b"2")})

        def remove(state: Account) -> Proposal[Account, bytes]:
            found = store.inner.attributes("account", "lease")["lease"]
            return Proposal([Add()], found, {"lease": AttributeChange(found, None)})

        just_before(store, "append", renew)
        assert replica.update_state_with_attributes(remove) == b"2"
        assert replica.state.value == 1
        assert store.attributes("account", "lease") == {}

    def test_calls_that_change_the_same_one_go_one_after_the_other(self, store: FailingStore) -> None:
        replica = opened(store)

        def count(state: Account) -> Proposal[Account, None]:
            found = store.attributes("account", "count").get("count")
            return Proposal([Add()], None, {"count": AttributeChange(found, str(int(found or 0) + 1).encode())})

        with threads(8) as pool:
            for future in [pool.submit(replica.update_state_with_attributes, count) for _ in range(80)]:
                answer(future)
        assert store.attributes("account", "count") == {"count": b"80"}
        assert replica.state.value == 80

    def test_calls_that_change_the_same_one_do_not_share_an_append(self, store: FailingStore) -> None:
        replica = opened(store)

        def count(state: Account) -> Proposal[Account, None]:
            found = store.inner.attributes("account", "count").get("count")
            return Proposal([Add()], None, {"count": AttributeChange(found, str(int(found or 0) + 1).encode())})

        barrier = Barrier(store, "append")
        with threads(3) as pool:
            calls = [pool.submit(replica.update_state_unconditionally, Add())]
            barrier.await_reached()
            calls += [pool.submit(replica.update_state_with_attributes, count) for _ in range(2)]
            joined(replica, 1)
            until(lambda: replica._follower.barred_thread is not None, "the other one waiting for room")
            barrier.release()
            for call in calls:
                answer(call)
        assert store.attributes("account", "count") == {"count": b"2"}

    def test_calls_that_change_more_than_one_append_can_do_not_share_it(self, store: FailingStore) -> None:
        replica = opened(store)

        def change(call: int, number: int) -> Callable[[Account], Proposal[Account, None]]:
            attributes = {f"{call}/{each}": AttributeChange(None, b"1") for each in range(number)}
            return lambda state: Proposal([Add()], None, attributes)

        barrier = Barrier(store, "append")
        with threads(4) as pool:
            calls = [pool.submit(replica.update_state_unconditionally, Add())]
            barrier.await_reached()
            calls += [
                pool.submit(replica.update_state_with_attributes, change(call, MAX_ATTRIBUTE_CHANGES // 2 + call))
                for call in range(2)
            ]
            joined(replica, 1)
            until(lambda: replica._follower.barred_thread is not None, "the other one waiting for room")
            barrier.release()
            for call in calls:
                answer(call)
        assert len(store.attributes("account")) == MAX_ATTRIBUTE_CHANGES + 1
        assert replica.state.value == 3
        with pytest.raises(InvalidArgumentError, match="attributes"):
            replica.update_state_with_attributes(change(3, MAX_ATTRIBUTE_CHANGES + 1))
        assert replica.state.value == 3

    def test_a_change_of_attributes_without_an_update_is_refused(self, store: FailingStore) -> None:
        replica = opened(store)
        with pytest.raises(InvalidArgumentError):
            replica.update_state_with_attributes(lambda state: Proposal((), None, {"a": AttributeChange(ANY, b"1")}))

    def test_a_lost_answer_is_recognised_with_them_too(self, store: FailingStore) -> None:
        replica = opened(store)
        for lose in (store.lose_answers, store.lose_requests):
            lose()
            found = store.inner.attributes("account", "a").get("a")
            change = AttributeChange(found, (found or b"") + b"x")
            replica.update_state_with_attributes(lambda state, c=change: Proposal([Add()], None, {"a": c}))
        assert store.attributes("account", "a") == {"a": b"xx"}
        assert opened(store.inner).state.value == 2


class TestDeadlines:
    def test_a_timeout_of_zero_is_one_attempt(self, store: FailingStore) -> None:
        replica = opened(store)
        assert replica.update_state_unconditionally(Add(), timeout=0).value == 1
        assert replica.fetch_updates(timeout=0).value == 1
        assert replica.wait_for(lambda state: state.value == 1, timeout=0).value == 1
        assert replica.compact(timeout=0)
        assert not replica.initialize(Account(), timeout=0)
        assert replica.update_state(lambda state: [], timeout=0).value == 1

    def test_a_timeout_of_zero_does_not_wait_for_a_store_that_is_away(self, store: FailingStore) -> None:
        replica = opened(store, clock=ManualClock())
        store.unavailable = True
        calls: list[Callable[[], object]] = [
            lambda: replica.update_state_unconditionally(Add(), timeout=0),
            lambda: replica.fetch_updates(timeout=0),
            lambda: replica.wait_for(lambda state: True, timeout=0),
            lambda: replica.compact(timeout=0),
            lambda: replica.delete(timeout=0),
        ]
        for call in calls:
            with pytest.raises(DeadlineExceededError):
                call()
        store.unavailable = False
        assert replica.fetch_updates().value == 0

    @pytest.mark.parametrize("call", ["update", "fetch", "wait_for", "compact", "open"])
    def test_a_store_that_is_away_is_waited_for_until_the_deadline_on_the_given_clock(
        self, call: str, store: FailingStore
    ) -> None:
        clock = ManualClock()
        replica = opened(store, clock=clock, timeout=7.0)
        calls: dict[str, Callable[[], object]] = {
            "update": lambda: replica.update_state_unconditionally(Add()),
            "fetch": replica.fetch_updates,
            "wait_for": lambda: replica.wait_for(lambda state: True),
            "compact": replica.compact,
            "open": lambda: opened(store, clock=clock, timeout=7.0),
        }
        store.unavailable = True
        with threads(1) as pool:
            before = len(store.operations)
            waiting = pool.submit(calls[call])
            until(lambda: len(store.operations) > before, "an attempt")
            until(lambda: is_waited_on(clock), "it pauses")  # else the pause would begin after the clock has moved
            clock.advance(6.9)
            until(lambda: len(store.operations) > before + 1, "another attempt")
            assert not waiting.done()
            clock.advance(0.1)
            with pytest.raises(DeadlineExceededError):
                answer(waiting)

    def test_a_beginning_of_which_nothing_is_heard_is_asked_for_again_by_opening_again(
        self, store: FailingStore
    ) -> None:
        stepwise(store).lose_answers()
        with pytest.raises(DeadlineExceededError, match="open it again"):
            opened(store, timeout=0)
        assert opened(store, timeout=0).state == Account()

    def test_a_creation_in_one_step_of_which_nothing_is_heard_is_found_by_opening_again(
        self, store: FailingStore
    ) -> None:
        def lose_the_answer(operation: Operation) -> None:
            if operation.verb == "create_together":
                store.after = None
                raise StoreUnavailableError("the answer is lost")

        store.after = lose_the_answer
        with pytest.raises(DeadlineExceededError, match="did not answer in time"):
            opened(store, timeout=0)
        assert opened(store, timeout=0).state == Account()
        store.after = lose_the_answer
        assert opened(store, name="other").state == Account()

    def test_a_store_that_comes_back_in_time_is_no_error(self, store: FailingStore) -> None:
        replica = opened(store)
        store.fail_appends(3)
        assert replica.update_state_unconditionally(Add()).value == 1

    def test_losing_every_race_ends_at_the_deadline_with_nothing_written(self, store: FailingStore) -> None:
        clock = ManualClock()
        replica, other = opened(store, clock=clock), opened(store.inner)
        attempts = 0

        def disturb(operation: object) -> None:
            nonlocal attempts
            if operation == ("append", "account"):
                attempts += 1
                other.update_state_unconditionally(Add(amount=10))
                clock.advance(1)

        store.before = disturb
        with pytest.raises(DeadlineExceededError, match="before every attempt"):
            replica.update_state_unconditionally(Add(), timeout=10)
        assert attempts == 10
        assert other.fetch_updates().value == 100

    def test_calls_that_wait_for_one_that_the_store_does_not_answer_blame_the_store(self, store: FailingStore) -> None:
        clock = ManualClock()
        replica = opened(store, clock=clock)
        barrier = Barrier(store, "append")
        hold = store.before
        assert hold is not None

        def hold_and_fail(operation: Operation) -> None:
            hold(operation)
            raise StoreUnavailableError("down")

        store.before = hold_and_fail
        with threads(2) as pool:
            calls = [pool.submit(replica.update_state_unconditionally, Add(), timeout=1)]
            barrier.await_reached()
            calls.append(pool.submit(replica.update_state_unconditionally, Add(), timeout=1))
            joined(replica, 1)
            clock.advance(1)
            barrier.release()
            for call in calls:
                with pytest.raises(DeadlineExceededError, match="the store did not"):
                    answer(call)

    def test_a_call_behind_one_that_reads_blames_the_store_too(self, store: FailingStore) -> None:
        replica = opened(store)
        replica._writer._queue._contention = MAX_CONTENTION  # so that it reads when it has the fair lock
        barrier = Barrier(store, "read")
        with threads(1) as pool:
            call = pool.submit(replica.update_state_unconditionally, Add())
            barrier.await_reached()
            with pytest.raises(DeadlineExceededError, match="no answer from the store"):
                replica.update_state_unconditionally(Add(), timeout=0.01)
            barrier.release()
            answer(call)

    def test_a_generator_that_waits_for_the_store_until_the_deadline_is_the_last_to_ask_it(
        self, store: FailingStore
    ) -> None:
        clock = ManualClock()
        replica = opened(store, clock=clock)

        def reads_a_lease(state: Account) -> list[Add]:
            store.unavailable = True
            clock.advance(5.0)
            store.attributes(replica.segment)
            return [Add()]

        with pytest.raises(DeadlineExceededError, match="did not answer in time.*cause=") as raised:
            replica.update_state(reads_a_lease, timeout=5.0)
        assert isinstance(raised.value.__cause__, StoreUnavailableError)
        assert store.operations[-1].verb == "attributes"

    def test_a_state_that_never_comes_is_waited_for_until_the_deadline(self, store_url: str) -> None:
        clock = ManualClock()
        with open_store(store_url, clock=clock) as store:
            self._wait_in_vain(store, clock)

    def _wait_in_vain(self, store: SegmentStore, clock: ManualClock) -> None:
        replica = opened(store, clock=clock)
        begun = threading.Event()
        with threads(1) as pool:
            waiting = pool.submit(replica.wait_for, lambda state: begun.set() or state.value == 5, timeout=3)
            assert begun.wait(PATIENCE_SECONDS)  # so that the time counts from now on
            for _ in range(30):
                opened(store).update_state_unconditionally(Add(amount=10))
                clock.advance(0.09)
            assert not waiting.done()
            clock.advance(1)
            with pytest.raises(DeadlineExceededError):
                answer(waiting)

    def test_a_full_store_is_told_at_once_and_the_call_works_later(self, store: FailingStore) -> None:
        replica = opened(store)

        def fill() -> None:
            raise StoreFullError("the disk is full")

        just_before(store, "append", fill)
        with pytest.raises(StoreFullError):
            replica.update_state_unconditionally(Add())
        assert replica.update_state_unconditionally(Add()).value == 1

    def test_an_interrupt_while_sending_is_the_callers_and_the_next_call_goes_on(self, store: FailingStore) -> None:
        replica = opened(store)

        def interrupt() -> None:
            raise KeyboardInterrupt

        just_before(store, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            replica.update_state_unconditionally(Add())
        assert replica.update_state_unconditionally(Add(amount=2)).value == 2


class TestFollowing:
    def test_waiting_ends_with_the_first_state_that_fulfils_the_condition(self, store: FailingStore) -> None:
        waiter, other = opened(store), opened(store)
        with threads(1) as pool:
            waiting = pool.submit(waiter.wait_for, lambda state: state.value >= 3)
            for _ in range(3):
                other.update_state_unconditionally(Add())
            assert answer(waiting).value >= 3

    def test_growth_is_told_once_it_is_there(self, store: FailingStore) -> None:
        one, two = opened(store), opened(store)
        assert not one.wait_for_growth(0)
        two.update_state_unconditionally(Add())
        assert one.wait_for_growth(0) and one.wait_for_growth(LONG)
        one.fetch_updates()
        assert not one.wait_for_growth(0)

    def test_watching_yields_the_present_and_then_the_newest(self, store: FailingStore) -> None:
        watcher, other = opened(store), opened(store)
        watching = watcher.watch()
        assert next(watching).value == 0
        other.update_state_unconditionally(Add())
        other.update_state_unconditionally(Add())
        assert next(watching).value == 2
        with threads(1) as pool:
            following = pool.submit(next, watching)
            other.update_state_unconditionally(Add())
            assert answer(following).value == 3

    def test_watching_survives_an_outage_of_the_store(self, store: FailingStore) -> None:
        watcher, other = opened(store), opened(store.inner)
        watching = watcher.watch()
        next(watching)
        with threads(1) as pool:
            following = pool.submit(next, watching)
            until(lambda: store.operations[-1].verb == "wait")  # a read that has begun could still see the change
            store.unavailable = True
            before = len(store.operations)
            other.update_state_unconditionally(Add())
            until(lambda: len(store.operations) > before, "an attempt during the outage")
            store.unavailable = False
            assert answer(following).value == 1

    def test_watching_survives_an_outage_while_it_waits(self, store: FailingStore) -> None:
        watcher, other = opened(store), opened(store.inner)
        watching = watcher.watch()
        next(watching)

        def break_off() -> None:
            other.update_state_unconditionally(Add())
            raise StoreUnavailableError("gone for a moment")

        just_before(store, "wait", break_off)
        assert next(watching).value == 1

    def test_closing_ends_the_watching(self, store: FailingStore) -> None:
        replica = opened(store)
        seen = []

        def watch() -> None:
            seen.extend(replica.watch())

        watching = threading.Thread(target=watch)
        watching.start()
        until(lambda: bool(seen), "the present state")
        begun = time.monotonic()
        replica.close()
        watching.join(LONG)
        assert not watching.is_alive() and time.monotonic() - begun < 2 * busyness()
        assert list(replica.watch()) == []

    def test_closing_the_store_under_a_watcher_is_told(self, store: FailingStore) -> None:
        watching = opened(store).watch()
        next(watching)
        store.close()
        with pytest.raises(ClosedError):
            next(watching)


class TestTransitions:
    def test_each_entry_is_told_once_in_order_whoever_wrote_it(self, store: FailingStore) -> None:
        one, two = opened(store), opened(store)
        one.update_state_unconditionally(Add())
        feed = one.transitions()
        one.update_state_unconditionally(Add(), Add())
        two.update_state_unconditionally(Put(key="a", value=1))
        one.update_state_unconditionally(Take(amount=3))
        one.fetch_updates()
        told = feed.drain()
        assert [(t.before and t.before.value, t.after and t.after.value) for t in told] == [
            (None, 1),
            (1, 3),
            (3, 3),
            (3, 0),
        ]
        assert [len(t.updates) for t in told] == [0, 2, 1, 1]
        assert [t.revision for t in told] == sorted({t.revision for t in told})
        assert told[-1].revision == one.revision
        assert not any(t.gap for t in told) and feed.drain() == []

    def test_the_end_and_the_new_beginning_of_a_state_are_told(self, store: FailingStore) -> None:
        replica = opened(store)
        feed = replica.transitions()
        replica.delete()
        replica.initialize(Account(value=3))
        assert [(t.before, t.after) for t in feed.drain()] == [
            (None, Account()),
            (Account(), None),
            (None, Account(value=3)),
        ]

    def test_each_is_told_once_while_threads_update_and_fetch(self, store: FailingStore) -> None:
        one, two = opened(store), opened(store)
        feeds = [one.transitions(), two.transitions()]
        with threads(6) as pool:
            work = [pool.submit(_repeat, r.update_state_unconditionally, Add()) for r in (one, one, two, two)]
            work += [pool.submit(_repeat, r.fetch_updates) for r in (one, two)]
            for future in work:
                answer(future)
        for replica, feed in zip((one, two), feeds, strict=True):
            replica.fetch_updates()
            values = [t.after.value for t in feed.drain() if t.after is not None]
            assert values == list(range(len(values))) and len(values) == 401

    def test_what_came_in_through_the_log_before_the_answer_did_is_not_told_again(self, store: FailingStore) -> None:
        """Another thread may have fetched a part of what this one has just appended."""
        writer = opened(store)
        follower = opened(store)._follower
        for _ in range(3):
            writer.update_state_unconditionally(Add())
        entries, _ = follower.log.read(follower.replica.next_offset, follower.replica.checksum)
        tail, transitions = follower.replica, []
        for entry in entries:
            tail, transition = tail.apply(entry, follower.codec.decode_body(entry.body))
            transitions.append(transition)
        feed = follower.transitions()
        follower.apply(entries[:2])
        follower.take_over(tail, transitions)
        follower.take_over(tail, transitions)
        assert [t.after and t.after.value for t in feed.drain()] == [0, 1, 2, 3]
        assert follower.replica == tail

    def test_a_feed_that_nobody_drains_keeps_the_gap_only(
        self, monkeypatch: pytest.MonkeyPatch, store: FailingStore
    ) -> None:
        monkeypatch.setattr("synchronizer.log.replica.MAX_TRANSITIONS", 5)
        replica = opened(store)
        feed = replica.transitions()
        for _ in range(7):
            replica.update_state_unconditionally(Add())
        told = [(t.before and t.before.value, t.after and t.after.value, t.gap) for t in feed.drain()]
        assert told == [(None, 5, True), (5, 6, False), (6, 7, False)]

    def test_a_closed_feed_hears_nothing_more(self, store: FailingStore) -> None:
        replica = opened(store)
        feed, other = replica.transitions(), replica.transitions()
        feed.close()
        feed.close()
        replica.update_state_unconditionally(Add())
        assert len(feed.drain()) == 1 and len(other.drain()) == 2

    def test_a_new_feed_begins_with_the_present(self, store: FailingStore) -> None:
        replica = opened(store)
        replica.update_state_unconditionally(Add())
        assert replica.transitions().drain() == [Transition(None, Account(value=1), replica.revision)]


class TestClosing:
    def test_a_closed_one_refuses_every_call_but_shows_its_state(self, store: FailingStore) -> None:
        replica = opened(store)
        replica.close()
        replica.close()
        calls: list[Callable[[], object]] = [
            replica.fetch_updates,
            replica.compact,
            replica.delete,
            lambda: replica.update_state_unconditionally(Add()),
            lambda: replica.initialize(Account()),
            lambda: replica.wait_for_growth(0),
            lambda: replica.wait_for(lambda state: True),
        ]
        for call in calls:
            with pytest.raises(ClosedError):
                call()
        assert replica.state == Account()
        assert opened(store).state == Account()  # the store is borrowed

    def test_closing_ends_the_wait_for_a_store_that_is_away(self, store: FailingStore) -> None:
        replica = opened(store)
        store.unavailable = True
        before = len(store.operations)
        with threads(2) as pool:
            waiting = [pool.submit(replica.fetch_updates), pool.submit(replica.update_state_unconditionally, Add())]
            until(lambda: len(store.operations) > before + 2, "attempts")
            replica.close()
            for future in waiting:
                with pytest.raises(ClosedError):
                    answer(future)

    def test_closing_after_a_lost_answer_leaves_the_outcome_unknown(self, store: FailingStore) -> None:
        replica = opened(store)
        store.lose_answers()
        just_before(store, "append", replica.close)
        with pytest.raises(OutcomeUnknownError):
            replica.update_state_unconditionally(Add())

    def test_a_forked_child_may_not_use_what_it_inherited(self, store: FailingStore) -> None:
        replica = opened(store)

        def all_refused() -> bool:
            for call in (
                replica.fetch_updates,
                lambda: replica.update_state_unconditionally(Add()),
                lambda: replica.wait_for_growth(0),
                lambda: next(replica.watch()),
            ):
                try:
                    call()
                except ClosedError as error:
                    if "parent process; connect after the fork" in str(error):
                        continue
                return False
            replica.close()
            return True

        # Held by another thread at the moment of the fork: the child would wait for it for ever.
        with replica._follower.lock, replica._writer._decider._lock:
            child = os.fork()
            if child == 0:
                os._exit(0 if all_refused() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert replica.update_state_unconditionally(Add()).value == 1


def test_applying_an_update_to_a_large_state_costs_what_it_costs_on_a_small_one() -> None:
    """Counted in calls of the interpreter, not in seconds."""

    def calls(size: int) -> int:
        replica = opened(open_store("memory://"), state_limit_bytes=1 << 30)
        replica.update_state_unconditionally(*[Put(key=f"key-{number}", value=number) for number in range(size)])
        replica.update_state_unconditionally(Put(key="key-0", value=-1))
        profile = cProfile.Profile()
        profile.enable()
        for number in range(10):
            replica.update_state_unconditionally(Put(key="key-0", value=number))
        profile.disable()
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert calls(20_000) < 1.2 * calls(2)


def test_a_name_may_hold_states_of_different_classes_one_after_the_other(store: FailingStore) -> None:
    class Other(State):
        word: str = ""

    opened(store).delete()
    other = StateSynchronizer(store, "account", initial=Other(word="new"), updates=[])
    assert other.state.word == "new"


def _repeat(call: Callable[..., object], *arguments: object) -> None:
    for _ in range(100):
        call(*arguments)
