"""What is closed while another thread joins leaves nobody behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from synchronizer import ClosedError, ReaderGroupError, open_store
from synchronizer.recipes.coordination.barrier import Barrier
from synchronizer.recipes.coordination.election import LeaderElection
from synchronizer.recipes.coordination.lock import Lock
from synchronizer.recipes.coordination.membership import Membership
from synchronizer.recipes.coordination.participant import ASK_SECONDS
from synchronizer.testing import FailingStore, InstantClock, ManualClock, Operation
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], object]]] = {
    "election": (partial(LeaderElection, name="ship", candidate_id="a"), LeaderElection.campaign),
    "membership": (partial(Membership, name="ship", member_id="a"), Membership.join),
    "lock": (partial(Lock, name="ship"), Lock.acquire),
    "barrier": (partial(Barrier, name="ship", parties=2), Barrier.wait),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_join_that_is_under_way_at_the_close_leaves_no_member(
    store_url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who leaves would be left to his lease if a busy machine took a second for it.
    monkeypatch.setattr("synchronizer.recipes.coordination.participant.ASK_SECONDS", PATIENCE_SECONDS)
    open_one, join = KINDS[kind]
    sent, goes_on = threading.Event(), threading.Event()
    with open_store(store_url) as shared:
        store = FailingStore(shared)
        one, other = open_one(store), open_one(shared)

        def hold(operation: Operation) -> None:
            if operation.verb == "append" and threading.current_thread() is not threading.main_thread():
                store.before = None
                sent.set()
                assert goes_on.wait(PATIENCE_SECONDS)

        store.before = hold
        joining = CallInThread(lambda: (join(one),))
        assert sent.wait(PATIENCE_SECONDS)
        (participant,) = [one._participant] if hasattr(one, "_participant") else one._participants._participants
        closing = CallInThread(lambda: (one.close(),))
        until(lambda: not participant.wanted, "it is being closed")
        goes_on.set()
        assert closing.ended() == (None,)
        assert joining.ended() == (False,) or isinstance(joining.result, ClosedError)
        assert other.synchronizer.fetch_updates().members == ()
        other.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_close_does_not_wait_for_a_clock_that_stands_still(kind: str) -> None:
    open_one, join = KINDS[kind]
    clock = ManualClock()
    with open_store("memory://closing", clock=clock) as shared:
        store = FailingStore(shared)
        one = open_one(store, clock=clock, threads=False)
        store.unavailable = True
        joining = CallInThread(lambda: (join(one),))
        until(lambda: any(operation.verb == "append" for operation in store.operations), "it tries")
        closing = CallInThread(lambda: (one.close(),))
        assert closing.ended() == (None,)
        assert isinstance(joining.ended(), ReaderGroupError)


STAYING = {
    "election": LeaderElection.campaign,
    "membership": Membership.join,
    "lock": Lock.acquire,
    "barrier": lambda barrier: barrier.arrival().join(timeout=1.0),
}


@pytest.mark.parametrize("kind", STAYING)
def test_what_is_closed_right_after_an_outage_leaves_at_once(kind: str) -> None:
    open_one, _ = KINDS[kind]
    clock = ManualClock()
    with open_store("memory://closing", clock=clock) as shared:
        store = FailingStore(shared)
        one, other = open_one(store, clock=clock, threads=False), open_one(shared, clock=clock, threads=False)
        STAYING[kind](one)
        assert len(other.synchronizer.fetch_updates().members) == 1
        store.unavailable = True
        clock.advance(5)
        one.step()  # a renewal fails
        clock.advance(2)
        store.unavailable = False
        one.close()
        assert other.synchronizer.fetch_updates().members == ()


@pytest.mark.parametrize("kind", STAYING)
def test_of_those_that_are_closed_in_an_outage_only_the_first_waits(kind: str) -> None:
    open_one, _ = KINDS[kind]
    clock = InstantClock()
    with open_store("memory://closing", clock=clock) as shared:
        store = FailingStore(shared)
        several = [open_one(store, **{"name": f"ship{n}"}, clock=clock, threads=False) for n in range(3)]
        for one in several:
            STAYING[kind](one)
        store.unavailable = True
        began = clock.monotonic()
        for one in several:
            one.close()
        assert ASK_SECONDS <= clock.monotonic() - began < 2 * ASK_SECONDS
