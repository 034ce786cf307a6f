from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable

import pytest

from synchronizer import (
    CorruptStateError,
    DeadlineExceededError,
    ManualClock,
    StoreUnavailableError,
    open_store,
)
from synchronizer.testing import FailingStore, Operation
from tests.synchronizer.accounts import (
    Add,
    Barrier,
    Put,
    Replica,
    answer,
    failing,
    just_before,
    opened,
    threads,
)


class Died(Exception):
    """The process ended at this point."""


def die() -> None:
    raise Died


def test_a_process_that_joins_starts_at_the_snapshot() -> None:
    store = failing()
    replica = opened(store.inner)
    replica.update_state_unconditionally(*[Put(key=f"key-{number}", value=number) for number in range(100)])
    assert replica.compact()
    replica.update_state_unconditionally(Add())
    joiner = opened(store)
    assert joiner.state == replica.state
    assert joiner.revision == replica.revision
    assert joiner.bytes_since_compaction == replica.bytes_since_compaction < 100


def test_a_state_that_did_not_change_is_not_compacted_again() -> None:
    store = open_store("memory://")
    one, two = opened(store), opened(store)
    assert one.compact()
    assert not one.compact() and not two.compact()
    assert one.bytes_since_compaction == two.bytes_since_compaction == 0


def test_the_log_before_the_mark_before_is_given_up() -> None:
    store = open_store("memory://")
    replica = opened(store)
    starts = []
    for _ in range(3):
        replica.update_state_unconditionally(Add())
        assert replica.compact()
        starts.append((store.info("account").start_offset, replica.applied_length))
    assert [start for start, _ in starts] == [0, starts[0][1], starts[1][1]]


def test_a_follower_less_than_one_compaction_behind_does_not_notice() -> None:
    store = open_store("memory://")
    one, follower = opened(store), opened(store)
    one.compact()
    follower.fetch_updates()
    feed = follower.transitions()
    feed.drain()
    one.update_state_unconditionally(Add())
    one.compact()
    follower.fetch_updates()
    assert [transition.gap for transition in feed.drain()] == [False]


def test_a_follower_further_behind_goes_on_from_the_snapshot() -> None:
    store = open_store("memory://")
    one, follower = opened(store), opened(store)
    for _ in range(3):
        one.update_state_unconditionally(Add())
        one.compact()
    one.update_state_unconditionally(Add())
    assert follower.fetch_updates() == one.state
    assert follower.revision == one.revision


def test_the_history_since_a_revision_is_what_was_applied_one_by_one() -> None:
    replica = opened(open_store("memory://"))
    feed = replica.transitions()
    replica.update_state_unconditionally(Add(), Add())
    replica.compact()
    replica.update_state_unconditionally(Put(key="a", value=1))
    replica.update_state_unconditionally(Add())
    first, before, *after = feed.drain()
    assert [(each.revision, each.updates, each.gap) for each in after] == [
        (each.revision, each.updates, each.gap) for each in replica.history(before.revision)
    ]
    assert [each.before for each in replica.history(before.revision)] == [each.before for each in after]
    assert replica.history(replica.revision) == []
    (gap, *rest) = replica.history(first.revision)
    assert (gap.before, gap.after, gap.revision, gap.gap) == (None, before.after, before.revision, True)
    assert [each.revision for each in rest] == [each.revision for each in after]


def test_a_history_begins_anew_where_its_snapshot_is_replaced_meanwhile() -> None:
    store = failing()
    replica, other = opened(store), opened(store.inner)
    replica.update_state_unconditionally(Add())
    other.compact()
    before = replica.revision

    def compact(operation: Operation) -> None:
        if operation.verb == "read" and operation.segment.startswith("snapshot/"):
            store.before = None
            for _ in range(2):
                other.update_state_unconditionally(Add())
                other.compact()

    store.before = compact
    (gap,) = replica.history(before)
    assert (gap.after, gap.gap) == (other.state, True)


def test_only_the_present_snapshot_is_kept() -> None:
    store = open_store("memory://")
    replica = opened(store)
    for _ in range(5):
        replica.update_state_unconditionally(Add())
        assert replica.compact()
    assert len(list(store.list("snapshot/"))) == 1


def test_a_state_whose_name_begins_alike_keeps_its_snapshots() -> None:
    store = open_store("memory://")
    for _ in range(2):
        for replica in (opened(store), opened(store, name="account/2"), opened(store, name="account2")):
            replica.update_state_unconditionally(Add())
            assert replica.compact()
    assert len(list(store.list("snapshot/"))) == 3
    assert opened(store).state.value == opened(store, name="account2").state.value == 2


class TestAutomatic:
    def test_the_log_stays_short_and_the_state_whole(self) -> None:
        store = open_store("memory://")
        replica = opened(store, compaction_bytes=2000)
        lengths = []
        for _ in range(500):
            replica.update_state_unconditionally(Add())
            lengths.append(replica.bytes_since_compaction)
        info = store.info("account")
        # The entry that makes it due is compacted with the rest, and not seen here.
        assert 2000 - 2 * lengths[0] < max(lengths) < 3200
        assert info.length - info.start_offset < 7000
        assert opened(store).state.value == 500

    def test_a_large_state_is_compacted_more_seldom(self) -> None:
        store = failing()
        replica = opened(store, compaction_bytes=1000)
        replica.update_state_unconditionally(*[Put(key=f"key-{number:05}", value=number) for number in range(2000)])
        replica.update_state_unconditionally(Add())
        size = len(store.inner.read(next(iter(store.inner.list("snapshot/"))), 0, 1 << 20))
        store.operations.clear()
        written = replica.applied_length
        while replica.applied_length - written < 6 * size:
            replica.update_state_unconditionally(*[Put(key=f"key-{number:05}", value=1) for number in range(50)])
        assert 2 <= store.count("create") <= 3

    def test_processes_have_different_thresholds(self) -> None:
        store = open_store("memory://")
        staggers = {opened(store)._compactor._stagger for _ in range(20)}
        assert len(staggers) == 20 and all(1 <= stagger < 1.5 for stagger in staggers)
        assert opened(store, rng=random.Random(1))._compactor._stagger == pytest.approx(1.067, abs=0.001)

    def test_a_process_that_sees_another_ones_compaction_leaves_it_at_that(self) -> None:
        store = failing()
        other, replica = opened(store.inner), opened(store, compaction_bytes=1000)
        for _ in range(18):
            replica.update_state_unconditionally(Add())
        other.compact()
        store.operations.clear()
        while not store.count("attributes"):  # that is, until it looks at the mark
            replica.update_state_unconditionally(Add())
        assert store.count("create") == 0
        assert replica.bytes_since_compaction < 800

    def test_one_that_fails_leaves_the_update_alone_and_is_tried_again_later(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = failing()
        replica = opened(store, compaction_bytes=1000)

        def fail(operation: Operation) -> None:
            if operation.verb == "create":
                raise DeadlineExceededError("the snapshot cannot be written")

        store.before = fail
        with caplog.at_level(logging.WARNING):
            for _ in range(100):
                replica.update_state_unconditionally(Add())
        assert replica.state.value == 100
        assert "compaction of account failed" in caplog.text
        assert 2 <= store.count("create") < 20  # and not at every update
        store.before = None
        for _ in range(100):
            replica.update_state_unconditionally(Add())
        assert replica.bytes_since_compaction < 2000

    def test_threads_of_one_process_compact_one_at_a_time(self) -> None:
        store = failing()
        replica = opened(store, compaction_bytes=200)
        barrier = Barrier(store, "create")
        with threads(1) as pool:
            compacting = pool.submit(lambda: [replica.update_state_unconditionally(Add()) for _ in range(20)])
            barrier.await_reached()
            for _ in range(20):
                replica.update_state_unconditionally(Add())
            assert store.count("create") == 1  # the snapshot that is held up
            barrier.release()
            answer(compacting)
        assert opened(store.inner).state.value == 40


class TestDyingInBetween:
    """A compaction that ends before any one of its store operations leaves a store that others go on with."""

    def _history(self, store: FailingStore) -> Replica:
        replica = opened(store)
        for _ in range(2):
            replica.update_state_unconditionally(Add())
            assert replica.compact()
        replica.update_state_unconditionally(Add())
        return replica

    def _operations(self) -> int:
        store = failing()
        replica = self._history(store)
        store.operations.clear()
        assert replica.compact()
        return len(store.operations)

    def _at(self, store: FailingStore, at: int, action: Callable[[], None]) -> Callable[[Operation], None]:
        begun = len(store.operations)

        def before(_: Operation) -> None:
            if len(store.operations) - begun == at:
                action()

        return before

    def test_every_point(self) -> None:
        number_of_operations = self._operations()
        assert number_of_operations >= 7  # fetch, mark, create, write, move, truncate, list, delete
        for at in range(1, number_of_operations + 1):
            store = failing()
            replica = self._history(store)
            follower = opened(store.inner)
            store.before = self._at(store, at, die)
            with pytest.raises(Died):
                replica.compact()
            store.before = None
            assert opened(store.inner).state.value == 3
            another = opened(store.inner)
            another.update_state_unconditionally(Add())
            assert another.compact()
            assert len(list(store.inner.list("snapshot/"))) == 1, "what the dead one left was cleaned up"
            for present in (opened(store.inner), follower):
                assert present.fetch_updates().value == 4

    def test_every_answer_may_be_lost(self) -> None:
        for at in range(1, self._operations() + 1):
            for lose in (FailingStore.lose_answers, FailingStore.lose_requests, FailingStore.fail_appends):
                store = failing()
                replica = self._history(store)
                store.before = self._at(store, at, functools.partial(lose, store))
                assert replica.compact()
                assert opened(store.inner).state.value == 3
                assert len(list(store.inner.list("snapshot/"))) == 1

    def test_a_store_that_stays_away_while_the_mark_moves_does_not_cost_the_snapshot(self) -> None:
        """The mark may have moved although nobody heard of it: what it names has to stay."""
        clock = ManualClock()
        store = failing()
        replica = self._history(store)
        patient = opened(store, clock=clock)
        lost = 0

        def before(operation: Operation) -> None:
            nonlocal lost
            if operation == ("append", "account"):
                lost += 1
                if lost == 1:
                    store.lose_answers()
                else:
                    clock.advance(100)
                    raise StoreUnavailableError("gone")

        store.before = before
        with pytest.raises(DeadlineExceededError):
            patient.compact(timeout=0)
        store.before = None
        assert opened(store.inner).state == replica.state


class TestSeveralAtOnce:
    def test_one_wins_and_the_others_leave_nothing_behind(self) -> None:
        store = failing()
        one, two = opened(store), opened(store.inner)
        one.update_state_unconditionally(Add())
        just_before(store, "append", two.compact, nth=2)
        assert not one.compact()
        assert len(list(store.list("snapshot/"))) == 1
        assert opened(store.inner).state.value == 1

    @pytest.mark.parametrize("verb", ["create", "append"])
    def test_one_whose_snapshot_was_cleaned_up_while_it_was_written_has_lost(self, verb: str) -> None:
        store = failing()
        one, two = opened(store), opened(store.inner)
        one.update_state_unconditionally(Add())

        def overtake() -> None:
            two.update_state_unconditionally(Add())
            assert two.compact()
            raise StoreUnavailableError("and the connection breaks as well")

        just_before(store, verb, overtake)
        assert not one.compact()
        assert opened(store.inner).state.value == 2

    def test_in_threads_while_updates_go_on(self) -> None:
        store = open_store("memory://")
        replicas = [opened(store) for _ in range(4)]

        def work(replica: Replica) -> int:
            won = 0
            for _ in range(50):
                replica.update_state_unconditionally(Add())
                won += replica.compact()
            return won

        with threads(4) as pool:
            won = [answer(future) for future in [pool.submit(work, replica) for replica in replicas]]
        assert sum(won) > 50
        assert {replica.fetch_updates().value for replica in replicas} == {200}
        assert opened(store).state.value == 200
        assert len(list(store.list("snapshot/"))) == 1


class TestReloads:
    def test_a_snapshot_replaced_while_it_is_read_is_followed_by_its_successor(self) -> None:
        store = failing()
        replica = opened(store.inner)

        def replace() -> None:
            replica.update_state_unconditionally(Add())
            assert replica.compact()

        for _ in range(3):
            replace()
        just_before(store, "read", replace)
        assert opened(store).state.value == 4

    @pytest.mark.parametrize("read", ["the snapshot", "the log"])
    def test_they_are_bounded(self, read: str) -> None:
        store = failing()
        replica = opened(store.inner)
        replica.compact()
        behind = opened(store)

        def replace(operation: Operation) -> None:
            if operation.verb == "read" and (operation.segment == "account") == (read == "the log"):
                for _ in range(2):
                    replica.update_state_unconditionally(Add())
                    assert replica.compact()

        for segment in ("account", "snapshot/account@"):
            replace(Operation("read", segment))
        store.before = replace
        with pytest.raises(DeadlineExceededError, match="replaced" if read == "the snapshot" else "truncated"):
            behind.fetch_updates()
        store.before = None
        assert behind.fetch_updates() == replica.state

    @pytest.mark.parametrize("compacted", [True, False])
    def test_a_log_that_was_truncated_too_far_is_damaged_and_not_waited_for(self, compacted: bool) -> None:
        store = open_store("memory://")
        replica, behind = opened(store), opened(store)
        if compacted:
            replica.compact()
            behind.fetch_updates()
        replica.update_state_unconditionally(Add())
        store.truncate("account", replica.applied_length)
        with pytest.raises(CorruptStateError, match="truncated"):
            behind.fetch_updates()
        with pytest.raises(CorruptStateError, match="truncated"):
            opened(store)

    def test_a_snapshot_that_is_gone_is_not_waited_for_without_end(self) -> None:
        store = open_store("memory://")
        replica = opened(store)
        replica.compact()
        for snapshot in store.list("snapshot/"):
            store.delete(snapshot)
        with pytest.raises(DeadlineExceededError):
            opened(store)

    def test_a_reload_is_told_as_a_gap(self) -> None:
        store = open_store("memory://")
        one, behind = opened(store), opened(store)
        feed = behind.transitions()
        for _ in range(2):
            one.update_state_unconditionally(Add())
            one.compact()
        one.update_state_unconditionally(Add())
        behind.fetch_updates()
        told = [(t.before and t.before.value, t.after and t.after.value, t.gap) for t in feed.drain()]
        assert told == [(None, 0, False), (0, 2, True), (2, 3, False)]
