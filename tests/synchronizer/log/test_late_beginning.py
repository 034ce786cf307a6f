"""A log that does not begin at 0, because an earlier log of its name was forgotten."""

from __future__ import annotations

import pytest

from synchronizer import NotFoundError, Revision, SegmentStore, StateSynchronizer, open_store
from synchronizer.log.entries import EntryLog
from tests.synchronizer.accounts import UPDATES, Account, Add, Put, Replica, failing, opened, stepwise

FIRST = 1_800_000_000_000_000
NEXT = FIRST + 1_000_000_000


@pytest.fixture(params=["in one step", "in steps"])
def store(request: pytest.FixtureRequest) -> SegmentStore:
    return open_store("memory://") if request.param == "in one step" else stepwise(failing())


def forgotten(store: SegmentStore, replica: Replica) -> None:
    replica.delete()
    EntryLog(store, replica.segment).forget(replica.applied_length)
    with pytest.raises(NotFoundError):
        store.info(replica.segment)
    assert not list(store.list("snapshot/"))


def test_it_is_followed_compacted_and_opened_as_any_other(store: SegmentStore) -> None:
    one = opened(store, first_offset=FIRST)
    assert one.revision == Revision(FIRST, 0) and one.bytes_since_compaction < 1000
    other = opened(store, first_offset=NEXT)
    for replica in (one, other):
        replica.update_state_unconditionally(Add())
    assert one.fetch_updates() == other.fetch_updates() == opened(store).state
    assert not one.was_compacted and one.bytes_since_compaction == other.bytes_since_compaction < 1000
    assert [each.gap for each in one.history(Revision(FIRST, 0))] == [False, False]
    for compacted in range(3):
        one.update_state_unconditionally(Put(key="key", value=compacted))
        assert one.compact() and one.was_compacted and one.bytes_since_compaction == 0
        assert other.fetch_updates() == opened(store).state == one.state


def test_an_automatic_compaction_is_due_as_early_as_in_any_other(store: SegmentStore) -> None:
    replica = opened(store, first_offset=FIRST, compaction_bytes=2000)
    replica.update_state_unconditionally(Add())
    assert not replica.was_compacted
    for number in range(60):
        replica.update_state_unconditionally(Put(key="key", value=number))
    assert replica.was_compacted


def test_a_state_too_large_to_create_the_log_with_begins_in_it(store: SegmentStore) -> None:
    large = Account().replace(entries=Account().entries.update({f"{number:09}": number for number in range(20_000)}))
    for first in (FIRST, NEXT):
        replica = StateSynchronizer(store, "account", initial=large, updates=UPDATES, first_offset=first)
        assert replica.state == opened(store).state == large
        assert store.info("account").start_offset == first
        forgotten(store, replica)


@pytest.mark.parametrize("is_compacted", [False, True])
@pytest.mark.parametrize("changes", [0, 3])
def test_who_followed_the_forgotten_log_goes_on_with_the_next(
    store: SegmentStore, is_compacted: bool, changes: int
) -> None:
    sleeper, one = opened(store), opened(store)
    feed = sleeper.transitions()
    for replica in (sleeper, one):
        replica.update_state_unconditionally(Add())
    sleeper.fetch_updates()
    sleeper.compact()
    seen = sleeper.revision
    feed.drain()
    one.fetch_updates()
    forgotten(store, one)
    with pytest.raises(NotFoundError):
        sleeper.fetch_updates()
    new = opened(store, first_offset=NEXT)
    for _ in range(changes):
        new.update_state_unconditionally(Add())
    if is_compacted:
        new.compact(keep_last=False)
    assert sleeper.fetch_updates() == new.state
    assert sleeper.revision == new.revision
    assert sleeper.bytes_since_compaction == new.bytes_since_compaction
    told = feed.drain()
    assert told[0].gap and told[-1].after == new.state
    assert [each.before for each in told[1:]] == [each.after for each in told[:-1]]
    assert [each.revision for each in sleeper.history(seen)][-1] == new.revision
    sleeper.update_state_unconditionally(Add())
    assert new.fetch_updates() == sleeper.state


def test_an_update_that_was_decided_on_the_forgotten_log_is_not_written_to_the_next(store: SegmentStore) -> None:
    """Both logs are as long, from their beginnings on."""
    sleeper, one = opened(store), opened(store)
    forgotten(store, one)
    new = opened(store, first_offset=NEXT)
    decided: list[Account] = []

    def decide(state: Account) -> list[Add]:
        decided.append(state)
        return [Add()]

    sleeper.update_state(decide)
    assert sleeper.revision > Revision(NEXT, 0) and new.fetch_updates() == sleeper.state
    assert len(decided) == 2  # the first decision was on the state that is gone
