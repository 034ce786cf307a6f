"""Takes a checkpoint of a group and waits for its readers to pass it."""

from __future__ import annotations

from typing import Final

from synchronizer import Deadline, DeadlineExceededError, NotFoundError, TransitionFeed

from .checkpoint import CheckpointState
from .errors import CheckpointFailedError, CheckpointTimeoutError
from .state import ReaderGroupState
from .state_manager import ReaderGroupStateManager

#: How much longer than asked for a checkpoint that failed is to take, to be given up.
_GIVE_UP_SECONDS: Final = 1.0


def take_checkpoint(
    manager: ReaderGroupStateManager, name: str, *, silent: bool = False, timeout: float
) -> CheckpointState:
    """Begin a checkpoint, and return it when it is completed; `CheckpointTimeoutError` says who has not passed it."""
    deadline = Deadline(manager.synchronizer.clock, timeout)
    feed = manager.synchronizer.transitions()
    try:
        return _Taking(manager, name, feed, _begin(manager, name, silent, deadline)).wait(deadline)
    finally:
        feed.close()


def _begin(manager: ReaderGroupStateManager, name: str, silent: bool, deadline: Deadline) -> int:
    """Begin it as soon as it is among those that may be under way; what `begin_checkpoint` returns."""
    while (after := manager.begin_checkpoint(name, silent=silent, timeout=deadline.remaining())) is None:
        try:
            manager.synchronizer.wait_for(_has_room, timeout=deadline.remaining())
        except DeadlineExceededError as error:
            others = manager.state.outstanding_checkpoints
            raise CheckpointTimeoutError(
                "others are under way, as many as may be; see max_outstanding_checkpoints",
                checkpoint=name,
                under_way=", ".join(each.name for each in others),
                readers=", ".join(sorted(others[0].waiting)) if others else "",
            ) from error
    return after


def _has_room(state: ReaderGroupState) -> bool:
    asked_for = [each for each in state.outstanding_checkpoints if not each.automatic]
    return len(asked_for) < state.config.max_outstanding_checkpoints


class _Taking:
    """One checkpoint that is under way, as its feed tells of it: a state keeps completed ones for some time only."""

    def __init__(
        self, manager: ReaderGroupStateManager, name: str, feed: TransitionFeed[ReaderGroupState], after: int
    ) -> None:
        self._manager = manager
        self._name = name
        self._feed = feed
        self._after = after
        self._seen: CheckpointState | None = None

    def wait(self, deadline: Deadline) -> CheckpointState:
        try:
            self._manager.synchronizer.wait_for(self._is_completed, timeout=deadline.remaining())
        except DeadlineExceededError as error:
            self._give_up(error)
        assert self._seen is not None
        return self._seen

    def _give_up(self, error: DeadlineExceededError) -> None:
        """Raises, unless it was completed in the last moment."""
        self._is_completed(self._manager.state)
        seen = self._seen
        if seen is not None and seen.completed:
            return
        waiting = self._manager.fail_checkpoint(seen.token, timeout=_GIVE_UP_SECONDS) if seen is not None else None
        if waiting is None and self._is_completed(self._manager.state):
            return
        raise CheckpointTimeoutError(
            "these readers have not passed the checkpoint in time, and it is given up",
            checkpoint=self._name,
            readers=", ".join(sorted(waiting or ())),
        ) from error

    def _is_completed(self, state: ReaderGroupState) -> bool:
        """Whether it is, by all states up to this one."""
        for transition in self._feed.drain():
            if self._seen is None or not self._seen.completed:
                self._look_for(transition.after)
        return self._seen is not None and self._seen.completed

    def _look_for(self, state: ReaderGroupState | None) -> None:
        if state is None:
            raise NotFoundError("the group was deleted", checkpoint=self._name)
        for each in state.checkpoints or ():
            is_it = each.token == self._seen.token if self._seen is not None else each.token > self._after
            if is_it and each.name == self._name:
                self._seen = each
                return
        if self._seen is not None:
            raise CheckpointFailedError(
                "the checkpoint was given up: the group was reset meanwhile, or its state had no room for it",
                checkpoint=self._name,
            )
