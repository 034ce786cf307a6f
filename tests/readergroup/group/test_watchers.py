"""Who looks at whose lease in a large group, and that the dead are found all the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest

from readergroup.group.model.state import ReaderState
from readergroup.group.model.updates import AddReader
from synchronizer.liveness.lease import (
    MAX_STAGGER_SECONDS,
    MORE_WATCHERS,
    SUSPECT,
    WATCHERS,
    LeaseObserver,
    by_rank,
    lease_attribute,
    stagger,
)
from synchronizer.testing import FailingStore
from tests.readergroup.processes_in_one import Process, World

TIMEOUT = 10.0
#: Until a reader that died has been removed: L1.
IN_TIME = TIMEOUT + 2


class CountingStore(FailingStore):
    """Counts the values of leases that it was asked for."""

    leases_read = 0

    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        found = super().attributes(segment, prefix, names=names)
        self.leases_read += sum(name.startswith("lease/") for name in found)
        return found


class Group:
    """A group of so many readers, each in a process of its own, by the names of the readers."""

    def __init__(self, world: World, readers: int) -> None:
        self.world = world
        self.processes: dict[str, Process] = {}
        for number in range(readers):
            process = world.process()
            process.store.inner = CountingStore(process.store.inner)
            process.reader(f"r{number}")
            self.processes[f"r{number}"] = process
        self.dead: set[str] = set()
        self.pass_time(3)

    @property
    def by_rank(self) -> Sequence[str]:
        return by_rank(self.world.state.readers)

    def kill(self, *readers: str) -> None:
        self.dead |= set(readers)

    def pass_time(self, seconds: float) -> None:
        living = [process for reader, process in self.processes.items() if reader not in self.dead]
        self.world.pass_time(seconds, alive=living)

    def leases_read_in(self, seconds: float, reader: str) -> int:
        store = self.processes[reader].store.inner
        assert isinstance(store, CountingStore)
        before = store.leases_read
        self.pass_time(seconds)
        return store.leases_read - before

    def removed(self) -> set[str]:
        return self.processes.keys() - self.world.state.readers.keys()


# ---------------------------------------------------------------------- the cost


def test_what_a_reader_looks_at_does_not_grow_with_its_group(world: World) -> None:
    group = Group(world, 2 * WATCHERS)
    last = group.by_rank[-1]
    few = group.leases_read_in(10, last)
    for number in range(100, 130):
        world.group.synchronizer.update_state_unconditionally(AddReader(reader=f"by hand {number}"))
    assert group.leases_read_in(10, last) == few == WATCHERS * 20


def test_in_a_small_group_everybody_looks_at_everybody(world: World) -> None:
    group = Group(world, WATCHERS)
    assert {group.leases_read_in(1, reader) for reader in group.processes} == {2 * WATCHERS}


def test_a_reader_that_leaves_or_joins_is_the_only_one_whose_lease_is_read(world: World) -> None:
    group = Group(world, 3)
    process = world.process()
    process.store.inner = store = CountingStore(process.store.inner)
    process.reader("r0")  # again
    assert store.leases_read == 1
    process.group.remove_reader("r1")
    assert store.leases_read == 2
    process.reader("new")
    assert store.leases_read == 2
    assert group.removed() == {"r1"}


# ---------------------------------------------------------------------- the dead


@pytest.mark.parametrize("ranks", [[0], [3], [WATCHERS], [-1], [0, 1, 2, 9, 10, -1], list(range(WATCHERS - 1))])
def test_l1_the_dead_are_removed_in_time_by_one_entry(world: World, ranks: list[int]) -> None:
    group = Group(world, 2 * WATCHERS)
    dead = {group.by_rank[rank] for rank in ranks}
    feed = world.group.synchronizer.transitions()
    group.kill(*dead)
    group.pass_time(IN_TIME)
    assert group.removed() == dead
    removals = [
        transition for transition in feed.drain() if any(update.tag == "remove_reader" for update in transition.updates)
    ]
    assert len(removals) <= 2  # their last renewals may lie on two sides of a look


def test_the_watchers_die_with_others_and_the_next_in_turn_have_begun_to_watch(world: World) -> None:
    group = Group(world, 3 * WATCHERS)
    watchers, others = set(group.by_rank[:WATCHERS]), set(group.by_rank[-3:])
    group.kill(*watchers, *others)
    group.pass_time(IN_TIME)
    assert group.removed() == watchers
    group.pass_time(SUSPECT * TIMEOUT)
    assert group.removed() == watchers | others


def test_those_who_were_next_die_with_the_watchers(world: World) -> None:
    group = Group(world, 3 * WATCHERS)
    first, others = set(group.by_rank[: 2 * WATCHERS]), set(group.by_rank[-3:])
    group.kill(*first, *others)
    group.pass_time(2 * TIMEOUT + 2)
    assert group.removed() == first | others


def test_a_process_watches_for_the_first_of_its_readers(world: World) -> None:
    group = Group(world, 2 * WATCHERS)
    last = group.by_rank[-1]  # until others join
    for number in range(100):
        group.processes[last].reader(f"more-{number}")
        if f"more-{number}" in group.by_rank[:WATCHERS]:
            break
    group.pass_time(1)
    assert group.leases_read_in(1, last) >= 2 * len(world.state.readers)


def test_f9_a_large_group_whose_store_was_away_loses_nobody(world: World) -> None:
    group = Group(world, 2 * WATCHERS)
    incarnations = dict(world.state.readers)
    for process in group.processes.values():
        process.store.unavailable = True
    for _ in range(4 * 15):
        world.clock.advance(0.25)
        for process in group.processes.values():
            process.group.coordinator.renew()
    for process in reversed(group.processes.values()):
        process.store.unavailable = False
        process.step()
    group.pass_time(2 * TIMEOUT)
    assert dict(world.state.readers) == incarnations


# ---------------------------------------------------------------------- which process acts


def readers(number: int, *, start: int = 0) -> dict[str, ReaderState]:
    return {f"r{n}": ReaderState(incarnation=n << 20, lease=f"l{n}") for n in range(start, start + number)}


def test_the_order_is_the_same_in_every_release() -> None:
    """Two that differ in it leave readers to one another that neither looks at."""
    assert [int(reader[1:]) for reader in by_rank(readers(12))] == [4, 7, 6, 10, 3, 5, 11, 2, 1, 0, 9, 8]


def test_readers_that_joined_one_after_the_other_are_not_neighbours() -> None:
    order = [int(reader[1:]) for reader in by_rank(readers(1000))]
    for first in range(0, 1000, 100):  # a machine with a tenth of the readers
        assert sum(first <= number < first + 100 for number in order[:WATCHERS]) <= 4


def test_readers_without_a_lease_come_last() -> None:
    by_hand = {"hand": ReaderState(incarnation=5)}
    assert by_rank({**by_hand, **readers(20)})[-1] == "hand"


@pytest.mark.parametrize("number", [1, 2, 8, 9, 10, 100, 1000])
def test_turns_come_one_after_the_other_and_none_too_late(number: int) -> None:
    waits = [stagger(rank, number) for rank in range(number + 1)]  # the last one is not in the group
    assert waits[0] == 0
    assert waits == sorted(waits) and len(set(waits)) == len(waits)
    assert waits[-1] <= MAX_STAGGER_SECONDS
    assert all(later - sooner > 0.05 for sooner, later in zip(waits, waits[1:WATCHERS], strict=False))


# ---------------------------------------------------------------------- the observer itself


class Leases:
    """An observer, and the leases that it looks at every half second."""

    def __init__(self, members: Mapping[str, ReaderState], own: str) -> None:
        self.members = dict(members)
        self.values = dict.fromkeys(members, 0)
        self.own = own
        self.now = 100.0
        self.observer = LeaseObserver()

    def pass_time(self, seconds: float, *, silent: Collection[str] = ()) -> list[str]:
        """Let all but the ``silent`` renew each second; who is dead then, as far as the observer looks."""
        dead: list[str] = []
        for step in range(int(seconds * 2)):
            self.now += 0.5
            if step % 2:
                self.values = {reader: count + (reader not in silent) for reader, count in self.values.items()}
            dead = self.look()
        return dead

    def look(self) -> list[str]:
        chosen = self.observer.choose(self.now, self.members, by_rank(self.members), [self.own])
        self.looked_at = set(chosen)
        values = {lease_attribute(f"l{reader[1:]}"): b"%d" % count for reader, count in self.values.items()}
        return self.observer.observe(self.now, chosen, values, TIMEOUT, renewed_at=self.now, asked_at=self.now)

    def leave(self, reader: str) -> None:
        del self.members[reader], self.values[reader]

    def join(self, members: Mapping[str, ReaderState]) -> None:
        self.members |= members
        self.values |= dict.fromkeys(members, 0)


def test_a_process_that_becomes_a_watcher_begins_anew_with_those_it_did_not_look_at() -> None:
    members = readers(2 * WATCHERS)
    order = by_rank(members)
    leases = Leases(members, own=order[WATCHERS])
    silent = order[-1]
    assert leases.pass_time(TIMEOUT, silent={silent}) == []
    assert leases.looked_at == set(order[:WATCHERS])
    del leases.members[order[0]]
    assert leases.pass_time(TIMEOUT, silent={silent}) == []
    assert leases.looked_at == leases.members.keys()
    assert leases.pass_time(0.5, silent={silent}) == [silent]


def test_a_process_that_is_relieved_lets_go_of_nobody_who_may_be_dead() -> None:
    """Those who watch instead have come after the death."""
    leases = Leases(readers(WATCHERS), own=by_rank(readers(WATCHERS))[0])
    silent = by_rank(leases.members)[1]
    leases.pass_time(3)
    leases.pass_time(TIMEOUT / 2, silent={silent})
    leases.join(readers(1000, start=100))
    watchers = by_rank(leases.members)[:WATCHERS]
    assert leases.own not in watchers and silent not in watchers
    leases.pass_time(2, silent={silent})
    assert leases.looked_at == {*watchers, silent}
    assert leases.pass_time(TIMEOUT / 2 - 2, silent={silent}) == [silent]


def test_one_sign_of_life_and_the_relieved_lets_go() -> None:
    leases = Leases(readers(WATCHERS), own=by_rank(readers(WATCHERS))[0])
    leases.pass_time(3)
    leases.join(readers(1000, start=100))
    leases.pass_time(2)
    assert leases.looked_at == set(by_rank(leases.members)[:WATCHERS])


def test_the_next_in_turn_begin_to_watch_when_no_watcher_gives_a_sign_of_life() -> None:
    members = readers(MORE_WATCHERS * WATCHERS + 10)
    order = by_rank(members)
    watchers = order[:WATCHERS]
    following, waiting = Leases(members, own=order[WATCHERS]), Leases(members, own=order[-1])
    for leases in (following, waiting):
        leases.pass_time(3)
        leases.pass_time(1.5 * SUSPECT * TIMEOUT, silent=watchers[1:])
        assert leases.looked_at == set(watchers)  # one of them is there
        leases.pass_time(SUSPECT * TIMEOUT + 1.5, silent=watchers)
    assert following.looked_at == members.keys()
    assert waiting.looked_at == set(order[: MORE_WATCHERS * WATCHERS])
    waiting.pass_time(2)
    assert waiting.looked_at == set(watchers)  # the next were heard of


@pytest.mark.parametrize(("number", "steps"), [(2 * WATCHERS, 1), (100, 2), (1000, 3)])
def test_the_last_one_alive_finds_all_others_dead_after_half_a_timeout_more_for_each_step(
    number: int, steps: int
) -> None:
    """Dead readers are removed as they are found, so other readers move up in rank meanwhile."""
    own = by_rank(readers(number))[-1]
    leases = Leases(readers(number), own=own)
    leases.pass_time(3)
    passed = 0.0
    while len(leases.members) > 1:
        passed += 1
        for dead in leases.pass_time(1, silent=leases.members.keys() - {own}):
            leases.leave(dead)
        assert passed <= TIMEOUT + steps * (SUSPECT * TIMEOUT + 1) + 1
    assert leases.members.keys() == {own}


def test_f9_whoever_was_paused_suspects_nobody() -> None:
    members = readers(4 * WATCHERS)
    order = by_rank(members)
    leases = Leases(members, own=order[WATCHERS])
    leases.pass_time(3)
    leases.now += 2 * TIMEOUT
    leases.look()
    assert leases.looked_at == set(order[:WATCHERS])
