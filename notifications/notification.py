"""What a listener hears: a `Notification`, and the `Change` of a state that gave rise to it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from synchronizer import Revision

#: The cause of what a new listener hears first.
PRESENT_VALUE: Final = "present value"
#: The cause of what stands for several changes.
SEVERAL_CHANGES: Final = "several changes"


class Change(BaseModel):
    """One change of a state, as its log has it.

    ``cause`` names the updates by their tags ("add, add"), or says `PRESENT_VALUE` or `SEVERAL_CHANGES`. ``updates``
    are these updates themselves, for ``detect``; they are not part of the JSON form. With ``gap``, changes before
    it were not seen one by one; where it stands for these as well, the cause says so and there are no updates.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    revision: Revision
    cause: str
    seen_at: AwareDatetime
    gap: bool = False
    #: The place of a notification among those that one notifier tells of the revision.
    index: int = 0
    updates: tuple[Any, ...] = Field(default=(), exclude=True, repr=False)


@dataclass(frozen=True, order=True, slots=True)
class NotificationKey:
    """The same whenever a notification is told, by whom and to whom ever."""

    revision: Revision
    index: int
    kind: str  # the name of its class


class Notification(BaseModel):
    """A past fact about a source, told to listeners. Subclasses add fields: ``Milestone(change=change, value=100)``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    change: Change

    @property
    def source(self) -> str:
        """What it is about, such as the name of a reader group."""
        return self.change.source

    @property
    def revision(self) -> Revision:
        """The revision of the source's state with which it became true."""
        return self.change.revision

    @property
    def cause(self) -> str:
        """The tags of the updates that made it true, or why it is told without one."""
        return self.change.cause

    @property
    def seen_at(self) -> datetime:
        """When this process saw it, in UTC: for people to read, not to be compared between machines."""
        return self.change.seen_at

    @property
    def gap(self) -> bool:
        """Whether changes before this one were not told one by one; the values told are those of ``revision``."""
        return self.change.gap

    @property
    def key(self) -> NotificationKey:
        """What a listener that may be told twice recognises it by. Keys of one source and class are in order."""
        return NotificationKey(self.revision, self.change.index, type(self).__name__)

    def after_gap(self) -> Self:
        """This notification, telling that others before it were left out."""
        return self._with_change(gap=True)

    def at(self, index: int) -> Self:
        """This notification, as the one with this number of its revision."""
        return self._with_change(index=index) if index else self

    def _with_change(self, **fields: Any) -> Self:
        return self.model_copy(update={"change": self.change.model_copy(update=fields)})
