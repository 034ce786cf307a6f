"""Take a checkpoint of a group, and wait for its readers to pass it."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Final

from synchronizer import (
    Deadline,
    DeadlineExceededError,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
    Revision,
    Transition,
    TransitionFeed,
)

from ..errors import CheckpointCancelledError, CheckpointFailedError, CheckpointTimeoutError
from .model.checkpoint import CheckpointState
from .model.state import ReaderGroupState
from .model.updates import CreateCheckpoint, FailCheckpoint, PassCheckpoint
from .updater import GroupUpdater, can_begin_checkpoint

#: How long giving a checkpoint up may take beyond its timeout.
_GIVE_UP_SECONDS: Final = 1.0


def take_checkpoint(updater: GroupUpdater, name: str, *, silent: bool = False, timeout: float) -> CheckpointState:
    """Begin a checkpoint, and return it when it is completed. `CheckpointTimeoutError` names readers that block it."""
    deadline = Deadline(updater.synchronizer.clock, timeout)
    feed = updater.synchronizer.transitions()
    pending = PendingCheckpoint(updater, name, feed)
    try:
        pending.begin(deadline, silent=silent)
        return pending.wait(deadline)
    except Exception:
        raise
    except BaseException:  # interrupted: nobody waits for it, and it would hold up the next ones
        with suppress(ReaderGroupError):
            pending.fail()
        raise
    finally:
        feed.close()


class PendingCheckpoint:
    """A checkpoint that is followed through a feed, because a state keeps completed ones only for some time."""

    def __init__(self, updater: GroupUpdater, name: str, feed: TransitionFeed[ReaderGroupState]) -> None:
        self._updater = updater
        self._name = name
        self._feed = feed
        self._after = math.inf  # no checkpoint is this one until it has begun
        self._begun_by = Revision(0, 0)
        self._seen: CheckpointState | None = None

    def begin(self, deadline: Deadline, *, silent: bool) -> None:
        """Begin the checkpoint as soon as the group has room for it."""
        updater, name = self._updater, self._name
        while (after := updater.begin_checkpoint(name, silent=silent, timeout=deadline.remaining())) is None:
            try:
                updater.synchronizer.wait_for(
                    partial(can_begin_checkpoint, silent=silent), timeout=deadline.remaining()
                )
            except DeadlineExceededError as error:
                others = [each for each in updater.state.outstanding_checkpoints if each.silent == silent]
                raise CheckpointTimeoutError(
                    "the maximum number of checkpoints is outstanding; wait for them, or raise "
                    "max_outstanding_checkpoints",
                    checkpoint=name,
                    under_way=", ".join(each.name for each in others),
                    readers=", ".join(sorted(others[0].waiting)) if others else "",
                ) from error
        self._after = after  # at once: from here on an interrupted call gives it up
        self._begun_by = updater.synchronizer.revision

    def wait(self, deadline: Deadline) -> CheckpointState:
        try:
            self._updater.synchronizer.wait_for(self._is_completed, timeout=deadline.remaining())
        except DeadlineExceededError as error:
            self._give_up(error)
        assert self._seen is not None
        return self._seen

    def _give_up(self, error: DeadlineExceededError) -> None:
        """Give the checkpoint up and raise, unless it was completed at the last moment."""
        waiting = self.fail()
        if waiting is None and self._is_completed(self._updater.state):
            return
        raise CheckpointTimeoutError(
            "some readers did not pass the checkpoint in time, so it was cancelled",
            checkpoint=self._name,
            readers=", ".join(sorted(waiting or ())),
        ) from error

    def fail(self) -> Collection[str] | None:
        """Give the checkpoint up, and return the readers that had not passed it; None if it is not outstanding."""
        state = self._updater.state
        if self._is_completed(state):
            return None
        found = self._seen or next(filter(self._is_it, state.checkpoints), None)  # unseen if `drain` was interrupted
        return None if found is None else self._updater.fail_checkpoint(found.token, timeout=_GIVE_UP_SECONDS)

    def _is_completed(self, state: ReaderGroupState) -> bool:
        """Return whether the checkpoint was completed in any state up to this one."""
        for transition in self._feed.drain():
            if self._seen is None or not self._seen.completed:
                self._look_for(transition)
        return self._seen is not None and self._seen.completed

    def _is_it(self, each: CheckpointState) -> bool:
        is_it = each.token == self._seen.token if self._seen is not None else each.token > self._after
        return is_it and each.name == self._name

    def _look_for(self, transition: Transition[ReaderGroupState]) -> None:
        state = transition.after
        if state is None:
            raise NotFoundError("the group was deleted", checkpoint=self._name)
        for each in filter(self._is_it, state.checkpoints):
            self._seen = each
            return
        if transition.gap and transition.revision >= self._begun_by:
            raise OutcomeUnknownError(
                "the checkpoint was completed or cancelled while this process was cut off, and the group no "
                "longer keeps it; take another",
                checkpoint=self._name,
            )
        if self._seen is not None:
            self._seen = _without_others(self._seen, transition)
        if self._seen is not None and not self._seen.completed:
            for update in transition.updates:
                if isinstance(update, FailCheckpoint) and update.checkpoint == self._seen.token and update.cancelled:
                    raise CheckpointCancelledError(
                        "a call of cancel_checkpoint cancelled the checkpoint", checkpoint=self._name
                    )
            raise CheckpointFailedError(
                "the checkpoint was cancelled, because the group was reset, the end of a stream changed, or the "
                "group's state became too large; take another",
                checkpoint=self._name,
            )


def _without_others(seen: CheckpointState, transition: Transition[ReaderGroupState]) -> CheckpointState:
    """Return the checkpoint as one entry leaves it, apart from the group's other checkpoints. One completed by the same
    entry may have displaced it from the state. A checkpoint that was given up is returned unchanged.
    """
    assert transition.before is not None, "it was there before"
    state = transition.before.replace(checkpoints=(seen,))
    for index, update in enumerate(transition.updates):
        of_another = isinstance(update, FailCheckpoint | PassCheckpoint) and update.checkpoint != seen.token
        if not of_another and not isinstance(update, CreateCheckpoint):
            state = update.apply_to(state, Revision(transition.revision.offset, index))
    return next((each for each in state.checkpoints if each.token == seen.token), seen)
