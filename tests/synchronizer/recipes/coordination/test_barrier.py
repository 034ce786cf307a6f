"""Who passes a barrier with whom, and what those hear who wait in vain."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from synchronizer import (
    BrokenBarrierError,
    ClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    ManualClock,
    OutcomeUnknownError,
    Revision,
    SegmentStore,
    Update,
    open_store,
)
from synchronizer.recipes.coordination.barrier import Barrier
from synchronizer.recipes.coordination.members import BROKEN, Break, Join, Leave, Members, empty_members
from synchronizer.recipes.coordination.participant import Participant
from synchronizer.testing import FailingStore
from tests.waiting import CallInThread, until

pytestmark = pytest.mark.stores(round_robin=True)
LONG = 60.0


@pytest.fixture
def store(store_url: str) -> Iterator[SegmentStore]:
    with open_store(store_url) as store:
        yield store


def a_barrier(store: SegmentStore, parties: int = 2, party: str | None = None) -> Barrier:
    return Barrier(store, "start", parties, party=party)


class Waiting(CallInThread[int]):
    """A thread that waits at the barrier."""

    def __init__(self, barrier: Barrier, timeout: float = LONG) -> None:
        super().__init__(partial(barrier.wait, timeout=timeout))


def wait_for_waiting(barrier: Barrier, number: int) -> None:
    barrier.synchronizer.wait_for(lambda state: len(state.waiting) == number, timeout=LONG)


def test_all_pass_when_the_last_has_come_again_and_again(store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    # Who leaves would be left to his lease if a busy machine took a second for it.
    monkeypatch.setattr("synchronizer.recipes.coordination.participant.ASK_SECONDS", LONG)
    barriers = [a_barrier(store, 3), a_barrier(store, 3)]
    for _ in range(3):
        waiting = []
        for number in range(2):
            waiting.append(Waiting(barriers[number]))
            wait_for_waiting(barriers[0], number + 1)
        assert barriers[1].n_waiting == 2
        assert barriers[1].wait(timeout=LONG) == 2
        assert [each.ended() for each in waiting] == [0, 1]
    assert barriers[0].synchronizer.fetch_updates().members == ()
    assert a_barrier(store, 3).parties == 3


def test_who_waits_too_long_breaks_the_barrier_for_the_others_and_the_next_begin_anew(store: SegmentStore) -> None:
    barrier = a_barrier(store, 3)
    other = Waiting(barrier)
    wait_for_waiting(barrier, 1)
    with pytest.raises(DeadlineExceededError, match="parties=3") as caught:
        barrier.wait(timeout=0.0)
    assert isinstance(caught.value, TimeoutError)
    error = other.ended()
    assert isinstance(error, BrokenBarrierError) and isinstance(error, threading.BrokenBarrierError), error
    waiting = [Waiting(barrier) for _ in range(3)]
    assert {each.ended() for each in waiting} == {0, 1, 2}


def test_a_reset_lets_those_who_wait_hear_of_it_and_changes_nothing_else(store: SegmentStore) -> None:
    barrier = a_barrier(store)
    waiting = Waiting(barrier)
    wait_for_waiting(barrier, 1)
    barrier.reset()
    assert isinstance(waiting.ended(), BrokenBarrierError)
    barrier.reset()
    waiting = Waiting(barrier)
    assert {barrier.wait(timeout=LONG), waiting.ended()} == {0, 1}


def test_who_comes_again_under_his_name_takes_out_his_former_life(store: SegmentStore) -> None:
    former = Participant(a_barrier(store, 3).synchronizer, "a", 10.0, changed=lambda: False, threads=False)
    former.join()  # and nothing more: it is dead
    other = Waiting(a_barrier(store, 3, "b"))
    wait_for_waiting(a_barrier(store, 3), 2)
    again = Waiting(a_barrier(store, 3, "a"))
    assert isinstance(other.ended(), BrokenBarrierError)
    wait_for_waiting(a_barrier(store, 3), 1)
    waiting = [again, Waiting(a_barrier(store, 3, "b")), Waiting(a_barrier(store, 3, "c"))]
    assert {each.ended() for each in waiting} == {0, 1, 2}


def test_who_passes_in_the_moment_when_he_gives_up_has_passed(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = a_barrier(store)
    others: list[Waiting] = []
    give_up = Participant.leave

    def give_up_a_moment_later(participant: Participant, **options: float) -> object:
        if not others:
            others.append(Waiting(a_barrier(store)))
            wait_for_waiting(a_barrier(store), 0)
        return give_up(participant, **options)

    monkeypatch.setattr(Participant, "leave", give_up_a_moment_later)
    assert barrier.wait(timeout=0.0) == 0
    assert others[0].ended() == 1


def test_who_gives_up_is_not_taken_for_one_that_this_process_left_behind(store: SegmentStore) -> None:
    clock = ManualClock()
    barrier = Barrier(store, "start", 2, clock=clock)
    for _ in range(2):  # they have passed, and are there still
        participant = Participant(barrier.synchronizer, "a", 10.0, changed=lambda: False, threads=False)
        participant.join()
    lease = barrier.synchronizer.state.members[0].lease
    waiting = Waiting(barrier, timeout=5.0)
    wait_for_waiting(a_barrier(store), 1)
    (participant,) = barrier._participants._participants
    participant._left_behind.add(lease)
    clock.advance(5.0)
    assert isinstance(waiting.ended(), DeadlineExceededError)
    assert len(barrier.synchronizer.fetch_updates().members) == 1


def test_where_the_store_is_away_at_the_deadline_nobody_can_know(store: SegmentStore) -> None:
    failing = FailingStore(store)
    clock = ManualClock()
    barrier = Barrier(failing, "start", 2, clock=clock)
    waiting = Waiting(barrier, timeout=5.0)
    wait_for_waiting(a_barrier(store), 1)
    failing.unavailable = True
    other = Waiting(a_barrier(store))
    clock.advance(5.0)
    until(lambda: bool(clock.advance(0.1)) or waiting.result, "the end of the pauses in which it asks again")
    assert isinstance(waiting.ended(), OutcomeUnknownError)
    assert other.ended() == 1


def test_closing_ends_the_waiting_here_and_elsewhere(store: SegmentStore) -> None:
    barrier, other = a_barrier(store, 3), a_barrier(store, 3)
    waiting, elsewhere = Waiting(barrier), Waiting(other)
    wait_for_waiting(other, 2)
    barrier.close()
    assert isinstance(waiting.ended(), ClosedError)
    assert isinstance(elsewhere.ended(), BrokenBarrierError)
    with pytest.raises(ClosedError):
        barrier.wait()


def test_a_barrier_has_the_parties_that_it_was_begun_with(store: SegmentStore) -> None:
    a_barrier(store)
    with pytest.raises(InvalidArgumentError, match="parties=2 given=3"):
        a_barrier(store, 3)
    with pytest.raises(InvalidArgumentError, match="parties must be an integer >= 1"):
        a_barrier(store, 0)
    assert Barrier(store, "alone", 1).wait() == 0


class History(RuleBasedStateMachine):
    """In any order of coming and going: so many as it takes pass together, or those who wait hear that they do not."""

    PARTIES = 3

    def __init__(self) -> None:
        super().__init__()
        self.state = empty_members(10.0, parties=self.PARTIES)
        self.offset = 0
        self.waiting: list[str] = []
        self.told: dict[str, int] = {}  # of those who are there

    def apply(self, update: Update[Members]) -> None:
        self.offset += 50
        self.state = update.apply_to(self.state, Revision(self.offset, 0))

    def break_all(self) -> None:
        self.told.update(dict.fromkeys(self.waiting, BROKEN))
        self.waiting = []

    @rule()
    def join(self) -> None:
        lease = f"{self.offset}"
        self.apply(Join(member="m", lease=lease))
        self.waiting.append(lease)
        if len(self.waiting) == self.PARTIES:
            self.told.update((lease, place) for place, lease in enumerate(self.waiting))
            self.waiting = []

    @precondition(lambda self: self.state.members)
    @rule(data=st.data(), cause=st.sampled_from(["left", "dead", "replaced"]))
    def leave(self, data: st.DataObject, cause: str) -> None:
        lease = data.draw(st.sampled_from(self.state.members)).lease
        self.apply(Leave.model_validate({"member": "m", "lease": lease, "cause": cause}))
        if self.told.pop(lease, None) is None:
            self.waiting.remove(lease)
            self.break_all()

    @rule()
    def reset(self) -> None:
        self.apply(Break())
        self.break_all()

    @invariant()
    def each_is_told_what_all_of_them_are(self) -> None:
        assert [each.lease for each in self.state.waiting] == self.waiting
        assert {each.lease: each.place for each in self.state.members if each.place is not None} == self.told


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
