"""What a durable name has not heard yet: the notifications after a stored position, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from synchronizer import Revision, State, StateSynchronizer, Transition, TransitionFeed

from .mailbox import N

S = TypeVar("S", bound=State)

#: As `HeardUpTo.told`: all notifications of the revision.
ALL: Final = -1


class HeardUpTo(NamedTuple):
    """The position of a durable name, as its role stores it."""

    offset: int
    update_index: int
    #: The number of the revision's notifications that were processed, or `ALL`.
    told: int
    #: These notifications report the revision as the present value, which a new name hears first.
    is_present_value: bool = False
    #: Changes before the revision were missed, and no notification has reported it yet.
    missed: bool = False

    @property
    def revision(self) -> Revision:
        return Revision(self.offset, self.update_index)


class NotComputedError(Exception):
    """The notifications of a change could not be computed. The cause says why."""


class Unheard(Generic[S, N]):
    """The notifications after a position. For one thread at a time.

    Args:
        synchronizer: The state whose changes are told.
        notifications_of: Returns the notifications of a transition; its second argument is whether changes before it
            were missed.
        heard: The stored position; None for a new name, which hears the present value first.
        changes: The transitions since the name was registered. Default: from now on.
    """

    def __init__(
        self,
        synchronizer: StateSynchronizer[S],
        notifications_of: Callable[[Transition[S], bool], Sequence[N]],
        heard: HeardUpTo | None,
        changes: TransitionFeed[S] | None,
    ) -> None:
        #: All notifications up to here are processed. None: there was no state yet.
        self.heard = heard
        self._synchronizer = synchronizer
        self._notifications_of = notifications_of
        self._changes = changes
        self._begun = False
        self._pending: list[Transition[S]] = []  # all after the position, with one that was told in part
        self._to_tell: Sequence[N] | None = None  # the notifications of the first of them

    def next(self) -> tuple[N, HeardUpTo] | None:
        """Return the next notification and the position after it; None if there is none now.

        The same one is returned until ``heard`` is set to that position. Changes without notifications move ``heard``.

        Raises:
            NotComputedError: ``notifications_of`` raised.
        """
        if self._begun:
            self._take_up_changes()
        else:
            self._begin()
        while self._pending and self.heard is not None:
            transition, heard = self._pending[0], self.heard
            revision = transition.revision
            if self._to_tell is None:
                try:
                    self._to_tell = self._notifications_of(transition, heard.missed)
                except Exception as error:
                    raise NotComputedError from error
            told = heard.told if heard.revision == revision else 0
            if 0 <= told < len(self._to_tell):
                is_last = told + 1 == len(self._to_tell)
                after = HeardUpTo(revision.offset, revision.index, ALL if is_last else told + 1)
                if not is_last:
                    is_present_value = heard.is_present_value and heard.revision == revision
                    after = after._replace(is_present_value=is_present_value, missed=heard.missed)
                return self._to_tell[told], after
            if told != ALL:
                missed = (heard.missed or transition.gap) and not self._to_tell
                self.heard = HeardUpTo(revision.offset, revision.index, ALL, missed=missed)
            del self._pending[0]
            self._to_tell = None
        return None

    def close(self) -> None:
        if self._changes is not None:
            self._changes.close()

    def _begin(self) -> None:
        """Find the changes that the name has not processed."""
        if self._changes is None:
            self._changes = self._synchronizer.transitions()  # first, so that no change is missed
        if self.heard is not None:
            self.heard, self._pending = self._in_the_log(self.heard)
        else:
            self._pending = list(self._changes.drain())
            if not self._pending:
                return  # there is no state
            revision = self._pending[0].revision
            self.heard = HeardUpTo(revision.offset, revision.index, 0, is_present_value=True)
        self._to_tell = None
        self._begun = True

    def _in_the_log(self, heard: HeardUpTo) -> tuple[HeardUpTo, list[Transition[S]]]:
        """Return the transitions in the log after the position, with one that was told in part."""
        after = heard.revision if heard.told == ALL else Revision(heard.offset, heard.update_index - 1)
        found = list(self._synchronizer.history(after))
        if found and heard.told != ALL and found[0].revision == heard.revision:
            if heard.is_present_value:  # the state before does not matter
                found[0] = Transition(None, found[0].after, found[0].revision)
            elif found[0].gap:  # the present value replaces the rest of what was told in part
                heard = heard._replace(told=0)
        return heard, found

    def _take_up_changes(self) -> None:
        """Queue the transitions applied since the last call."""
        assert self.heard is not None
        assert self._changes is not None
        reached = self._pending[-1].revision if self._pending else self.heard.revision
        new = [each for each in self._changes.drain() if each.revision > reached]
        if any(each.before is None or each.gap for each in new):
            self._changes.close()
            self._changes, self._begun = None, False
            self._begin()
        else:
            self._pending += new
