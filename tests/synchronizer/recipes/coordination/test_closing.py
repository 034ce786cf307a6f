"""What is closed while another thread joins leaves nobody behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from synchronizer import ClosedError, SegmentStore, open_store
from synchronizer.recipes.coordination.barrier import Barrier
from synchronizer.recipes.coordination.election import LeaderElection
from synchronizer.recipes.coordination.lock import Lock
from synchronizer.recipes.coordination.membership import Membership
from synchronizer.testing import FailingStore, Operation
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

KINDS: dict[str, tuple[Callable[[SegmentStore], Any], Callable[[Any], object]]] = {
    "election": (lambda store: LeaderElection(store, "ship", "a"), lambda each: each.campaign()),
    "membership": (lambda store: Membership(store, "ship", "a"), lambda each: each.join()),
    "lock": (lambda store: Lock(store, "ship"), lambda each: each.acquire()),
    "barrier": (lambda store: Barrier(store, "ship", parties=2), lambda each: each.wait()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_join_that_is_under_way_at_the_close_leaves_no_member(store_url: str, kind: str) -> None:
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
