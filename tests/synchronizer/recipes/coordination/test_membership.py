"""Who is there, who has left, and who is dead, on a clock that is moved by hand."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from synchronizer import (
    ClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    StoreUnavailableError,
    SystemClock,
)
from synchronizer.liveness.keeper import RETRY_SECONDS
from synchronizer.liveness.lease import WATCHERS
from synchronizer.recipes.coordination.membership import Membership
from synchronizer.testing import FailingStore, Operation
from synchronizer.threads.delayed_calls import DelayedCalls
from tests.synchronizer.recipes.stepped import TIMEOUT, World, a_world
from tests.waiting import until

pytestmark = pytest.mark.stores(round_robin=True)


class StepByStep(Membership):
    def __init__(self, world: World, member_id: str, *, timeout_seconds: float = TIMEOUT) -> None:
        self.failing: FailingStore = world.store()
        super().__init__(
            self.failing, "fleet", member_id, member_timeout_seconds=timeout_seconds, clock=world.clock, threads=False
        )


@pytest.fixture
def world(store_url: str) -> Iterator[World]:
    with a_world(store_url) as world:
        yield world


def member(world: World, member_id: str, **options: float) -> StepByStep:
    found = world.add(StepByStep(world, member_id, **options))
    found.join()
    return found


def test_members_are_listed_in_the_order_of_their_joining(world: World) -> None:
    a, b, c = (member(world, name) for name in "cab")
    assert {tuple(each.members()) for each in (a, b, c)} == {("c", "a", "b")}
    b.join()
    b.leave()
    assert a.members() == ["c", "b"]
    b.join()
    assert a.members() == ["c", "b", "a"]


def test_a_dead_member_is_taken_out_within_the_timeout_and_two_seconds(world: World) -> None:
    a, b = member(world, "a"), member(world, "b")
    world.pass_time(30)
    assert a.members() == ["a", "b"]
    world.kill(b)
    world.pass_time(TIMEOUT / 2)
    assert a.members() == ["a", "b"] and b.is_member
    world.pass_time(TIMEOUT / 2 + 2)
    assert a.members() == ["a"] and not b.is_member


def test_a_member_that_was_taken_for_dead_joins_again(world: World) -> None:
    a, b = member(world, "a"), member(world, "b")
    world.kill(a)
    world.pass_time(TIMEOUT + 2)
    assert b.members() == ["b"]
    world.add(a)
    world.pass_time(1)
    assert b.members() == ["b", "a"] and a.is_member


def test_f17_a_member_whose_id_was_taken_stays_out(world: World) -> None:
    first, second = member(world, "a"), member(world, "a")
    world.pass_time(30)
    assert (first.is_member, second.is_member) == (False, True)
    assert [each.incarnation for each in world.state("membership/fleet").members] == [
        second._participant.members()[0].incarnation
    ]
    first.join()
    world.pass_time(30)
    assert (first.is_member, second.is_member) == (True, False)


def test_f9_an_outage_of_the_store_takes_nobody_out(world: World) -> None:
    members = [member(world, name) for name in "abc"]
    before = world.state("membership/fleet")
    for each in members:
        each.failing.unavailable = True
    world.pass_time(3 * TIMEOUT)
    assert not any(each.is_member for each in members)
    for each in members:
        each.failing.unavailable = False
        world.pass_time(0.25)
    world.pass_time(2)
    assert world.state("membership/fleet") == before
    assert all(each.is_member for each in members)


def test_the_first_who_is_there_decides_the_timeout(world: World) -> None:
    a, b = member(world, "a", timeout_seconds=5.0), member(world, "b", timeout_seconds=20.0)
    assert (a.member_timeout_seconds, b.member_timeout_seconds) == (5.0, 5.0)
    for each in (a, b):
        each.leave()
    b.join()
    a.join()
    assert (a.member_timeout_seconds, b.member_timeout_seconds) == (20.0, 20.0)
    world.kill(b)
    world.pass_time(19)
    assert a.members() == ["b", "a"]
    world.pass_time(3)
    assert a.members() == ["a"]


def test_a_member_that_leaves_while_the_store_is_away_is_dead_to_the_others(world: World) -> None:
    a, b = member(world, "a"), member(world, "b")
    b.failing.unavailable = True
    with pytest.raises(DeadlineExceededError):
        b.leave(timeout=0)
    b.failing.unavailable = False
    world.pass_time(TIMEOUT + 2)
    assert a.members() == ["a"]


@pytest.mark.stores("memory")
def test_what_a_member_costs_at_rest_does_not_grow_with_the_number_of_members(world: World) -> None:
    """ADR 15: all but the first eight by rank read the leases of these eight only."""
    members = [member(world, f"m{number}") for number in range(3 * WATCHERS)]
    world.pass_time(TIMEOUT)
    looked_at: dict[str, int] = {}
    for each in members:
        observed: list[int] = []
        each.failing.before = None
        read = each._participant._watch._read_leases

        def counted(chosen: object, read: object = read, observed: list[int] = observed) -> object:
            found = read(chosen)  # type: ignore[operator]
            observed.append(len(found))
            return found

        each._participant._watch._read_leases = counted  # type: ignore[method-assign, assignment]
        looked_at[each.member_id] = 0
        world.clock.advance(0.5)
        each.step()
        looked_at[each.member_id] = max(observed)
    assert sorted(looked_at.values()) == [WATCHERS] * 2 * WATCHERS + [3 * WATCHERS] * WATCHERS


# ---------------------------------------------------------------------- listeners


class Heard:
    """What listeners heard, in order."""

    def __init__(self, membership: Membership) -> None:
        self.heard: list[str] = []
        self.tell = membership.synchronizer.poll_listeners
        membership.on_joined(lambda member: self.heard.append(f"+{member}"))
        membership.on_left(lambda member: self.heard.append(f"-{member}"))
        membership.on_dead(lambda member: self.heard.append(f"!{member}"))

    def becomes(self, *expected: str) -> None:
        self.tell()
        assert self.heard == [*expected]


def test_listeners_hear_who_joins_leaves_and_dies_each_once_and_in_order(world: World) -> None:
    a = member(world, "a")
    outside = StepByStep(world, "outside")
    heard = [Heard(a), Heard(outside)]
    b, c = member(world, "b"), member(world, "c")
    b.leave()
    world.kill(c)
    world.pass_time(TIMEOUT + 2)
    member(world, "d")
    member(world, "d")
    for each in heard:
        each.becomes("+b", "+c", "-b", "!c", "+d", "-d", "+d")


def test_a_listener_that_raises_stops_no_other(world: World, caplog: pytest.LogCaptureFixture) -> None:
    a = member(world, "a")
    a.on_joined(sys.exit)
    a.on_joined(lambda member: 1 // 0)
    heard = Heard(a)
    member(world, "b")
    heard.becomes("+b")
    assert "ZeroDivisionError" in caplog.text


# ---------------------------------------------------------------------- threads


def test_the_threads_begin_with_joining_and_end_with_leaving(world: World) -> None:
    before = {*threading.enumerate()}  # those of another test may be about to end

    def threads() -> set[str]:
        new = {*threading.enumerate()} - before
        return {thread.name for thread in new if thread.name.startswith("membership/fleet")}

    membership = Membership(world.store(), "fleet", "a", clock=SystemClock())
    assert threads() == set()
    with membership:
        until(lambda: threads() == {"membership/fleet-lease", "membership/fleet-members"}, "the threads")
        assert membership.members() == ["a"]
    until(lambda: threads() == set(), "the end of the threads")
    membership.close()
    assert world.state("membership/fleet").members == ()
    with pytest.raises(ClosedError):
        membership.join()


def test_who_joins_while_another_thread_leaves_has_threads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, joining = DelayedCalls.remove, []

    def remove_while_another_joins(self: DelayedCalls, key: object) -> None:
        if not joining:
            joining.append(threading.Thread(target=membership.join))
            joining[0].start()
            joining[0].join(1.0)  # unless it has to wait for this
        remove(self, key)

    membership = Membership(world.store(), "fleet", "a", clock=SystemClock())
    membership.join()
    monkeypatch.setattr(DelayedCalls, "remove", remove_while_another_joins)
    membership.leave()
    joining[0].join()
    names = {"membership/fleet-lease", "membership/fleet-members"}
    until(lambda: names <= {thread.name for thread in threading.enumerate()}, "the threads")
    membership.close()


def test_a_member_that_cannot_join_again_now_does_so_later(world: World, caplog: pytest.LogCaptureFixture) -> None:
    store = world.store(SystemClock())
    with (
        Membership(world.store(SystemClock()), "fleet", "a", member_timeout_seconds=0.5) as a,
        Membership(store, "fleet", "b"),
    ):

        def take_nothing(operation: Operation) -> None:
            if operation.verb == "append":
                raise StoreUnavailableError("it takes nothing now")

        store.before = take_nothing
        until(lambda: "fleet-members: " in caplog.text, "an attempt that failed")
        until(lambda: a.members() == ["a"], "the other has removed it")
        store.before = None
        # On a busy machine, the other may be the one that was removed last.
        until(lambda: sorted(a.members()) == ["a", "b"], "one that did not")


def test_a_member_that_cannot_read_what_is_new_tries_again_after_pauses(world: World) -> None:
    """The store says that the log has grown, and does not give it."""
    store = world.store(SystemClock())
    tries: list[float] = []

    def refuse_reads(operation: Operation) -> None:
        if operation.verb == "read":
            tries.append(time.monotonic())
            raise StoreUnavailableError("it gives nothing now")

    with Membership(store, "fleet", "a"), Membership(world.store(SystemClock()), "fleet", "b") as b:
        store.before = refuse_reads
        b.leave()
        until(lambda: len(tries) > 5, "five more tries")
        store.before = None
    assert tries[5] - tries[0] > 5 * RETRY_SECONDS - 0.1


@pytest.mark.parametrize("member_id", ["", "x" * 251])
def test_an_id_that_cannot_be_is_refused(world: World, member_id: str) -> None:
    with pytest.raises(InvalidArgumentError, match="1 to 250 characters"):
        StepByStep(world, member_id)


@pytest.mark.parametrize("timeout_seconds", [0.0, -1.0, 1e9])
def test_a_timeout_that_cannot_be_is_refused(world: World, timeout_seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match="member_timeout_seconds must be"):
        StepByStep(world, "a", timeout_seconds=timeout_seconds)
