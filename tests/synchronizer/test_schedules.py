"""The schedules that break simpler versions of the state synchronizer, each as a test."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import pytest

from synchronizer import (
    AppendResult,
    AttributeChange,
    Conflict,
    CorruptStateError,
    ManualClock,
    Map,
    NotFoundError,
    OutcomeUnknownError,
    Revision,
    StateSynchronizer,
    StateTooLargeError,
    UnknownUpdateError,
    Update,
    open_store,
)
from synchronizer.log.contention import FIRST_PAUSE_SECONDS, PROBE_AT_LEAST_EVERY, PROBE_EVERY
from synchronizer.state import StateCodec
from synchronizer.testing import FailingStore
from tests.synchronizer.accounts import (
    UPDATES,
    Account,
    Add,
    Barrier,
    Drop,
    LateStore,
    Put,
    Replica,
    Take,
    answer,
    failing,
    joined,
    just_before,
    opened,
    stepwise,
    threads,
)


class TestF1LostAnswers:
    def test_a_stored_update_is_recognised_and_the_generator_not_asked_again(self) -> None:
        store = failing()
        replica = opened(store)
        asked = 0

        def generator(state: Account) -> list[Add]:
            nonlocal asked
            asked += 1
            return [Add()]

        store.lose_answers()
        assert replica.update_state(generator).value == 1
        assert asked == 1
        assert opened(store.inner).state.value == 1

    def test_an_update_that_was_not_stored_is_sent_again(self) -> None:
        store = failing()
        replica = opened(store)
        store.lose_requests(3)
        assert replica.update_state_unconditionally(Add()).value == 1
        assert opened(store.inner).state.value == 1

    def test_it_is_found_behind_which_others_have_written(self) -> None:
        store = failing()
        replica, other = opened(store), opened(store.inner)
        store.lose_answers()
        just_before(store, "append", lambda: other.update_state_unconditionally(Add(amount=10)), nth=2)
        assert replica.update_state_unconditionally(Add()).value == 1
        assert replica.state.value == other.fetch_updates().value == 11

    def test_an_update_that_another_was_faster_than_is_decided_again(self) -> None:
        store = failing()
        replica, other = opened(store), opened(store.inner)
        store.lose_requests()
        just_before(store, "append", lambda: other.update_state_unconditionally(Add(amount=10)), nth=2)
        assert replica.update_state_unconditionally(Add()).value == 11
        assert other.fetch_updates().value == 11

    def test_an_append_that_lands_before_its_own_retry_counts(self) -> None:
        store = LateStore(open_store("memory://"))
        replica = opened(store)
        store.lose_requests()
        just_before(store, "append", lambda: store.let_arrive(0), nth=2)
        assert replica.update_state_unconditionally(Add()).value == 1
        assert opened(store.inner).state.value == 1

    def test_an_append_that_arrives_after_its_retry_is_refused_by_the_offset(self) -> None:
        store = LateStore(open_store("memory://"))
        replica = opened(store)
        store.lose_requests()
        replica.update_state_unconditionally(Add())
        assert isinstance(store.let_arrive(0), Conflict)
        assert replica.fetch_updates().value == 1

    def test_an_append_that_arrives_after_its_caller_decided_anew_is_refused_too(self) -> None:
        store = LateStore(open_store("memory://"))
        replica, other = opened(store), opened(store.inner)
        store.lose_requests()
        just_before(store, "append", lambda: other.update_state_unconditionally(Add(amount=10)), nth=2)
        replica.update_state_unconditionally(Add())
        assert isinstance(store.let_arrive(0), Conflict)
        assert replica.fetch_updates().value == other.fetch_updates().value == 11

    @pytest.mark.parametrize("stored", [True, False])
    def test_truncated_before_it_could_be_looked_up_is_an_unknown_outcome(self, stored: bool) -> None:
        store = failing()
        replica, other = opened(store), opened(store.inner)

        def truncate() -> None:
            for _ in range(2):
                other.update_state_unconditionally(Add(amount=10))
                assert other.compact()

        store.lose_answers() if stored else store.lose_requests()
        just_before(store, "append", truncate, nth=2)
        with pytest.raises(OutcomeUnknownError):
            replica.update_state_unconditionally(Add())
        assert replica.fetch_updates() == other.fetch_updates()
        assert replica.update_state_unconditionally(Add()).value == 21 + stored

    def test_truncated_without_a_lost_answer_is_decided_again(self) -> None:
        store = failing()
        replica, other = opened(store), opened(store.inner)

        def truncate() -> None:
            for _ in range(2):
                other.update_state_unconditionally(Add(amount=10))
                assert other.compact()

        just_before(store, "append", truncate)
        assert replica.update_state_unconditionally(Add()).value == 21

    def test_an_answer_lost_until_the_deadline_is_an_unknown_outcome(self) -> None:
        store = failing()
        replica = opened(store)
        store.lose_answers()
        with pytest.raises(OutcomeUnknownError):
            replica.update_state_unconditionally(Add(), timeout=0)
        assert replica.fetch_updates().value == 1

    def test_the_next_call_after_an_unknown_outcome_goes_on_from_what_is_there(self) -> None:
        for lose, expected in ((FailingStore.lose_answers, 11), (FailingStore.lose_requests, 10)):
            store = failing()
            replica = opened(store)
            lose(store)
            with pytest.raises(OutcomeUnknownError):
                replica.update_state_unconditionally(Add(), timeout=0)
            assert replica.update_state_unconditionally(Add(amount=10)).value == expected

    def test_a_failure_after_a_lost_answer_does_not_claim_that_nothing_was_written(self) -> None:
        store = failing()
        replica = opened(store)
        store.lose_answers()
        just_before(store, "append", lambda: store.inner.seal("account"), nth=2)
        with pytest.raises(OutcomeUnknownError):
            replica.update_state_unconditionally(Add())

    def test_beginning_and_deleting_a_state_survive_lost_answers(self) -> None:
        store = failing()
        store.lose_answers()
        replica = opened(store)
        assert replica.state == Account()
        store.lose_answers()
        assert replica.delete()
        store.lose_requests()
        assert replica.initialize(Account(value=5))
        assert opened(store.inner).state.value == 5


class TestF2UnconditionalUpdates:
    def test_one_that_can_no_longer_be_applied_raises_and_poisons_nobody(self) -> None:
        store = open_store("memory://")
        one, two = opened(store), opened(store)
        one.update_state_unconditionally(Put(key="a", value=1))
        two.fetch_updates()
        one.update_state_unconditionally(Drop(key="a"))
        length = store.info("account").length
        with pytest.raises(KeyError):
            two.update_state_unconditionally(Drop(key="a"))
        assert store.info("account").length == length
        for replica in (one, two, opened(store)):
            assert replica.fetch_updates().entries == Map()

    def test_they_are_applied_again_to_the_newer_state(self) -> None:
        store = open_store("memory://")
        one, two = opened(store), opened(store)
        one.update_state_unconditionally(Add(amount=10))
        assert two.update_state_unconditionally(Take(amount=3), Add(amount=1)).value == 8
        assert one.fetch_updates().value == 8


class TestF3DeleteAndCreate:
    def test_an_update_decided_on_the_old_state_is_not_applied_to_the_new_one(self) -> None:
        store = failing()
        old, other = opened(store), opened(store.inner)
        old.update_state_unconditionally(Add(amount=100))
        seen = []

        def recreate() -> None:
            other.delete()
            other.initialize(Account(value=5))
            while store.inner.info("account").length <= old.applied_length:
                other.update_state_unconditionally(Add(amount=0))

        def generator(state: Account) -> list[Add]:
            seen.append(state.value)
            return [Add()]

        just_before(store, "append", recreate)
        assert old.update_state(generator).value == 6
        assert seen == [100, 5]

    def test_revisions_and_tokens_of_a_name_only_grow(self) -> None:
        store = open_store("memory://")
        replica = opened(store)
        tokens = [replica.revision.token]
        for _ in range(3):
            replica.update_state_unconditionally(Add())
            tokens.append(replica.revision.token)
            assert replica.delete()
            assert replica.initialize(Account())
            tokens.append(replica.revision.token)
        assert tokens == sorted(set(tokens))
        assert opened(store).revision == replica.revision

    def test_a_replica_learns_of_the_end_and_of_the_new_beginning(self) -> None:
        store = open_store("memory://")
        one, two = opened(store), opened(store)
        assert one.delete() and not one.delete()
        for use in (two.fetch_updates, lambda: two.update_state_unconditionally(Add()), lambda: two.state):
            with pytest.raises(NotFoundError):
                use()
        assert two.initialize(Account(value=7)) and not one.initialize(Account())
        assert one.fetch_updates().value == 7

    def test_the_log_of_a_deleted_state_is_given_up(self) -> None:
        store = open_store("memory://")
        replica = opened(store)
        replica.update_state_unconditionally(Put(key="a" * 1000, value=1))
        replica.delete()
        info = store.info("account")
        assert info.start_offset == info.length > 1000


class TestF12MixedReleases:
    def test_an_unknown_tag_stops_the_replica_and_says_which(self) -> None:
        class Later(Update[Account], tag="later"):
            def apply_to(self, state: Account, revision: Revision) -> Account:
                return state

        store = open_store("memory://")
        old = opened(store)
        new = StateSynchronizer(store, "account", state_type=Account, updates=[Add, Later])
        new.update_state_unconditionally(Later())
        for _ in range(2):
            with pytest.raises(UnknownUpdateError, match="deploy the release") as raised:
                old.fetch_updates()
            assert raised.value.facts["tag"] == "later"
            assert raised.value.facts["revision"] == str(new.revision)
        with pytest.raises(UnknownUpdateError):
            old.update_state_unconditionally(Add())
        with pytest.raises(UnknownUpdateError):
            old.compact()

    def test_an_unknown_field_is_refused_and_not_left_out(self) -> None:
        class AddSome(Update[Account], tag="add"):
            amount: int = 1
            reason: str | None = None

            def apply_to(self, state: Account, revision: Revision) -> Account:
                return state.replace(value=state.value + self.amount)

        store = open_store("memory://")
        old = opened(store)
        new = StateSynchronizer(store, "account", state_type=Account, updates=[AddSome])
        new.update_state_unconditionally(AddSome())
        assert old.fetch_updates().value == 1  # unused, so not written
        new.update_state_unconditionally(AddSome(reason="a gift"))
        with pytest.raises(UnknownUpdateError) as raised:
            old.fetch_updates()
        assert raised.value.facts["tag"] == "add"
        assert raised.value.facts["fields"] == ["reason"]

    def test_a_later_format_of_the_state_is_neither_applied_nor_compacted(self) -> None:
        class Cents(Account, format=2):
            pass

        class AddCents(Update[Cents], tag="add"):
            amount: int = 1

            def apply_to(self, state: Cents, revision: Revision) -> Cents:
                return state.replace(value=state.value + self.amount)

        store = open_store("memory://")
        follower, joiner = opened(store), opened(store)
        new = StateSynchronizer(store, "account", state_type=Cents, updates=[AddCents], compaction_bytes=None)
        assert new.compact()
        with pytest.raises(UnknownUpdateError):
            opened(store)
        joiner.update_state_unconditionally(Add())
        with pytest.raises(UnknownUpdateError):
            joiner.compact()
        new.update_state_unconditionally(AddCents())
        with pytest.raises(UnknownUpdateError) as raised:
            follower.fetch_updates()
        assert raised.value.facts["format"] == 2

    def test_a_new_field_of_the_state_that_is_not_used_does_not_stop_the_release_before(self) -> None:
        class Longer(Account):
            limit: int | None = None

        store = open_store("memory://")
        old = opened(store)
        old.update_state_unconditionally(Add())
        new = StateSynchronizer(store, "account", state_type=Longer, updates=UPDATES)
        assert new.compact()
        assert opened(store).state.value == 1

    def test_a_snapshot_with_a_new_field_of_the_state_stops_the_release_before(self) -> None:
        class Longer(Account):
            limit: int | None = None

        class Limit(Update[Longer], tag="add"):
            amount: int = 1

            def apply_to(self, state: Longer, revision: Revision) -> Longer:
                return state.replace(limit=self.amount)

        store = open_store("memory://")
        new = StateSynchronizer(store, "account", initial=Longer(), updates=[Limit], compaction_bytes=None)
        new.update_state_unconditionally(Limit())
        assert new.compact()
        with pytest.raises(UnknownUpdateError) as raised:
            opened(store)
        assert raised.value.facts["fields"] == ["limit"]
        assert raised.value.facts["type"] == "Account"
        assert raised.value.facts["revision"] == str(new.revision)

    def test_a_class_may_be_retired_once_a_compaction_has_passed_it(self) -> None:
        def without_put() -> Replica:
            return StateSynchronizer(store, "account", initial=Account(), updates=[Add], compaction_bytes=None)

        store = open_store("memory://")
        old = opened(store)
        old.update_state_unconditionally(Put(key="a", value=1))
        with pytest.raises(UnknownUpdateError) as raised:
            without_put()
        assert raised.value.facts["tag"] == "put"
        assert old.compact()
        new = without_put()
        assert new.update_state_unconditionally(Add()) == old.fetch_updates()


class TestF13Compaction:
    def test_the_mark_never_goes_back_whoever_was_paused(self) -> None:
        store = failing()
        slow, fast = opened(store), opened(store.inner)
        slow.update_state_unconditionally(Add())

        def overtake() -> None:
            for _ in range(2):
                fast.update_state_unconditionally(Add())
                assert fast.compact()

        just_before(store, "append", overtake, nth=2)  # between the snapshot and the mark
        assert not slow.compact()
        assert opened(store.inner).state.value == 3
        assert slow.fetch_updates().value == 3

    def test_updates_go_on_while_a_snapshot_is_written(self) -> None:
        store = failing()
        compacting, other = opened(store), opened(store.inner)
        compacting.update_state_unconditionally(Add())
        for verb in ("create", "append", "truncate", "list"):
            attempts = len(store.operations)
            just_before(store, verb, lambda: other.update_state_unconditionally(Add()))
            assert compacting.compact()
            conflicts = [o for o in store.operations[attempts:] if o.verb == "append" and o.segment == "account"]
            assert len(conflicts) == 1  # the mark
        assert opened(store.inner).state.value == compacting.fetch_updates().value == 5


class TestF14NothingToDo:
    def test_it_takes_one_fetch_however_often_others_append(self) -> None:
        store = failing()
        replica, other = opened(stepwise(store)), opened(store.inner)
        store.before = lambda _: other.update_state_unconditionally(Add())
        store.operations.clear()
        asked = []
        assert replica.update_state(lambda state: asked.append(state.value) or []).value == 1
        assert asked == [0, 1]
        assert [operation.verb for operation in store.operations] == ["read"]

    def test_it_stands_on_a_state_that_was_read_after_the_call_began(self) -> None:
        store = open_store("memory://")
        replica, other = opened(store), opened(store)
        other.update_state_unconditionally(Add())
        took = replica.update_state_returning(lambda state: ([Take(amount=1)], True) if state.value else ([], False))
        assert took
        assert other.fetch_updates().value == 0

    def test_it_does_not_stand_on_an_entry_that_is_stored_and_whose_answer_is_late(self) -> None:
        store = failing()
        replica, other = opened(store), opened(store.inner)
        barrier = Barrier(store, "append", after=True)
        with threads(3) as pool:
            first = pool.submit(replica.update_state_unconditionally, Add())
            barrier.await_reached()
            other.update_state_unconditionally(Add(amount=10))
            second = pool.submit(replica.update_state, lambda state: [])
            third = pool.submit(replica.update_state_unconditionally, Add(amount=100))
            try:
                assert answer(second).value == 11
            finally:
                barrier.release()
            answer(first), answer(third)
        assert other.fetch_updates().value == 111


class TestF18Coalescing:
    def test_what_was_found_on_a_result_that_is_not_stored_in_the_end_does_not_stand(self) -> None:
        store = failing()
        replica, other = opened(store), opened(store.inner)
        barrier = Barrier(store, "append")
        with threads(2) as pool:
            first = pool.submit(replica.update_state, lambda state: [] if state.value == 7 else [Put(key="a", value=1)])
            barrier.await_reached()
            second = pool.submit(replica.update_state, lambda state: [] if "a" in state.entries else [Add(amount=100)])
            other.update_state_unconditionally(Add(amount=7))  # and the first changes its mind
            barrier.release()
            answer(first), answer(second)
        assert other.fetch_updates() == Account(value=107)

    def test_one_that_raises_is_left_out_and_those_behind_it_never_saw_it(self) -> None:
        store = failing()
        replica = opened(store)
        barrier = Barrier(store, "append")
        with threads(3) as pool:
            first = pool.submit(replica.update_state_unconditionally, Add())
            barrier.await_reached()
            failed = pool.submit(replica.update_state_unconditionally, Add(amount=50), Take(amount=100))
            last = pool.submit(replica.update_state_unconditionally, Add(amount=2))
            joined(replica, 1)
            barrier.release()
            with pytest.raises(ValueError, match="only"):
                answer(failed)
            answer(first), answer(last)
        assert opened(store.inner).state.value == 3


class TestF20LimitOfTheState:
    def test_it_refuses_what_makes_the_state_larger_and_lets_it_shrink(self) -> None:
        replica = opened(open_store("memory://"), state_limit_bytes=2000)
        with pytest.raises(StateTooLargeError) as raised:
            for number in range(1000):
                replica.update_state_unconditionally(Put(key=f"key-{number:04}", value=number))
        stored = len(replica.state.entries)
        assert 100 < stored < 300
        assert raised.value.facts["limit"] == 2000
        over = opened(replica.store, state_limit_bytes=100)
        with pytest.raises(StateTooLargeError):
            over.update_state_unconditionally(Put(key="another", value=1))
        assert len(over.update_state_unconditionally(Drop(key="key-0000")).entries) == stored - 1
        over.update_state_unconditionally(Put(key="key-0001", value=2))  # as large as before

    def test_an_update_may_be_declared_to_pass_but_takes_no_other_with_it(self) -> None:
        class Close(Update[Account], tag="close", may_exceed_limit=True):
            def apply_to(self, state: Account, revision: Revision) -> Account:
                return state.replace(entries=state.entries.set("closed", 1))

        begun = Account(entries=Map({"x" * 200: 1}))
        StateSynchronizer(store := open_store("memory://"), "account", initial=begun, updates=[*UPDATES, Close])
        replica = StateSynchronizer(
            store, "account", state_type=Account, updates=[*UPDATES, Close], state_limit_bytes=100
        )
        with pytest.raises(StateTooLargeError):
            replica.update_state_unconditionally(Close(), Put(key="y", value=1))
        assert len(replica.update_state_unconditionally(Close()).entries) == 2

    def test_a_state_that_was_loaded_is_as_large_as_its_snapshot(self) -> None:
        replica = opened(open_store("memory://"))
        for number in range(200):
            replica.update_state_unconditionally(Put(key=f"key-{number:04}", value=number))
        replica.compact()
        assert len(replica.state.entries) == 200
        loaded = opened(replica.store, state_limit_bytes=2500)
        loaded.update_state_unconditionally(Put(key="key-0200", value=200))
        with pytest.raises(StateTooLargeError):
            for number in range(201, 300):
                loaded.update_state_unconditionally(Put(key=f"key-{number:04}", value=number))
        assert 201 <= len(loaded.state.entries) < 240

    def test_a_beginning_that_is_too_large_is_refused(self) -> None:
        store = open_store("memory://")
        large = Account(entries=Map({"x" * 2_000_000: 1}))
        with pytest.raises(StateTooLargeError):
            StateSynchronizer(store, "account", initial=large, updates=UPDATES)
        assert list(store.list()) == []

    def test_a_small_state_is_measured_seldom(self, monkeypatch: pytest.MonkeyPatch) -> None:
        measured = 0

        def size(codec: StateCodec[Account], state: Account) -> int:
            nonlocal measured
            measured += 1
            return 1000

        monkeypatch.setattr(StateCodec, "size", size)
        replica = opened(open_store("memory://"))
        for _ in range(1000):
            replica.update_state_unconditionally(Add())
        assert measured == 0
        assert opened(replica.store, state_limit_bytes=1001).update_state_unconditionally(Add())
        assert measured > 0


class TestF22StoppedHolderOfTheFairLock:
    def test_contenders_wait_for_it_once_and_then_go_on_without_and_try_it_again_after_a_pause(self) -> None:
        store, clock = stepwise(failing()), ManualClock()
        replica, other = opened(store, clock=clock), opened(store.inner, clock=clock)
        left = 3

        def disturb() -> None:
            nonlocal left
            left -= 1
            other.update_state_unconditionally(Add())
            if left:
                just_before(store, "append", disturb)

        with store.inner.fair_lock("account", 0) as has_it:
            assert has_it
            just_before(store, "append", disturb)
            for _ in range(10):
                replica.update_state_unconditionally(Add())
            # Looked at the first call of all, which began the state, and waited once.
            assert store.count("fair_lock") == 2
            clock.advance(FIRST_PAUSE_SECONDS)
            for _ in range(10):
                replica.update_state_unconditionally(Add())
            # Looked, and waited once more.
            assert store.count("fair_lock") == 4
        assert replica.state.value == 23

    def test_one_who_wins_every_race_looks_for_those_who_wait_and_stands_in_line_behind_them(self) -> None:
        store = stepwise(failing())
        replica = opened(store, clock=ManualClock())
        with store.inner.fair_lock("account", 0) as has_it:
            assert has_it
            for _ in range(2 * PROBE_EVERY):
                replica.update_state_unconditionally(Add())
        # Looked at first, looked again, waited in vain, and lets the stopped one be.
        assert store.count("fair_lock") == 3
        assert replica.state.value == 2 * PROBE_EVERY

    def test_one_who_is_alone_looks_ever_less_often_down_to_a_limit_and_stands_in_no_line(self) -> None:
        store = stepwise(failing())
        replica = opened(store)
        for _ in range(PROBE_EVERY + 2 * PROBE_EVERY + 3 * PROBE_AT_LEAST_EVERY):
            replica.update_state_unconditionally(Add())
        assert store.count("fair_lock") == 1 + 2 + 3

    def test_one_who_has_just_come_stands_in_line_behind_those_who_wait(self) -> None:
        store = failing()
        opened(store.inner)
        late = opened(store)
        store.operations.clear()
        with ExitStack() as held:
            assert held.enter_context(store.inner.fair_lock("account", 0))
            just_before(store, "fair_lock", held.close, nth=2)
            late.update_state_unconditionally(Add(), timeout=10)
        # It looked, waited, and read what was new before it decided.
        assert [operation.verb for operation in store.operations] == ["fair_lock", "fair_lock", "read", "append"]


class TestFairness:
    def _contended(self, store: FailingStore) -> Replica:
        """A replica that has just lost several races, so that it stands in line from now on.

        It has a clock without time slices, in which it would keep the lock for its next call.
        """
        replica, other = opened(store, clock=ManualClock()), opened(store.inner)
        for _ in range(3):
            just_before(store, "append", lambda: other.update_state_unconditionally(Add()))
            replica.update_state_unconditionally(Add())
        return replica

    def test_who_loses_races_decides_while_holding_the_fair_lock_and_then_lets_go_of_it(self) -> None:
        store = failing()
        replica = self._contended(store)
        free = []

        def look(state: Account) -> list[Add]:
            with store.inner.fair_lock("account", 0) as is_free:
                free.append(is_free)
            return [Add()]

        replica.update_state(look)
        assert free == [False]
        with store.inner.fair_lock("account", 0) as is_free:
            assert is_free

    def test_it_lets_go_when_the_call_fails(self) -> None:
        store = failing()
        replica = self._contended(store)
        with pytest.raises(ValueError):
            replica.update_state_unconditionally(Take(amount=1000))
        assert store.count("fair_lock") >= 1
        with store.inner.fair_lock("account", 0) as is_free:
            assert is_free

    def test_a_process_stands_in_line_once_for_all_its_threads(self) -> None:
        store = failing()
        replica = self._contended(store)
        with threads(8) as pool:
            for future in [pool.submit(replica.update_state_unconditionally, Add()) for _ in range(8)]:
                answer(future)
        assert replica.state.value == 14

    def test_who_meets_nobody_for_a_while_does_without_the_lock(self) -> None:
        store = failing()
        replica = self._contended(store)
        for _ in range(30):
            replica.update_state_unconditionally(Add())
        locks = store.count("fair_lock")
        replica.update_state_unconditionally(Add())
        assert 0 < store.count("fair_lock") == locks


class TestF23StoreThatLostData:
    def _restored(self, number_of_updates: int) -> tuple[FailingStore, StateSynchronizer[Account]]:
        """A replica whose store was set back to a backup, and went on with other entries."""
        backup = open_store("memory://")
        source = opened(backup)
        store = failing()
        store.inner.create("account")
        store.inner.append("account", backup.read("account", 0, 10_000))
        replica = opened(store)
        replica.update_state_unconditionally(Add(amount=1))
        for _ in range(number_of_updates):
            source.update_state_unconditionally(Add(amount=2))
        store.inner = backup
        return store, replica

    @pytest.mark.parametrize("number_of_updates", [0, 1, 2])
    def test_a_replica_notices_when_it_fetches(self, number_of_updates: int) -> None:
        _, replica = self._restored(number_of_updates)
        if number_of_updates == 1:
            assert replica.fetch_updates().value == 1  # nothing new to see; the next entry tells
            opened(replica.store).update_state_unconditionally(Add())
        for _ in range(2):
            with pytest.raises(CorruptStateError, match="lost acknowledged data"):
                replica.fetch_updates()

    @pytest.mark.parametrize("number_of_updates", [0, 2])
    def test_a_replica_notices_when_it_updates(self, number_of_updates: int) -> None:
        store, replica = self._restored(number_of_updates)
        appends = store.count("append")
        with pytest.raises(CorruptStateError, match="lost acknowledged data"):
            replica.update_state_unconditionally(Add())
        assert store.count("append") == appends + 1


class WithoutDelta(FailingStore):
    """Tells of a conflict, and not what was written."""

    def append(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        answer = super().append(segment, data, expected_offset=expected_offset, attributes=attributes)
        return replace(answer, delta=b"") if isinstance(answer, Conflict) else answer


class TestF24ConflictsWithoutADelta:
    """A store may not know what was written when it refuses an append: the log is read before anything is decided."""

    def test_the_generator_is_asked_again_with_what_is_there(self) -> None:
        store = WithoutDelta(open_store("memory://"))
        replica, other = opened(store), opened(store.inner)
        seen: list[int] = []

        def generator(state: Account) -> list[Add]:
            seen.append(state.value)
            return [Add()]

        just_before(store, "append", lambda: other.update_state_unconditionally(Add(amount=10)))
        assert replica.update_state(generator).value == 11
        assert seen == [0, 10]

    def test_ones_own_entry_is_recognised_and_the_generator_not_asked_again(self) -> None:
        store = WithoutDelta(open_store("memory://"))
        replica = opened(store)
        store.lose_answers()
        assert replica.update_state_unconditionally(Add()).value == 1
        assert opened(store.inner).state.value == 1
