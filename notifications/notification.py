"""`Notification`, which a listener receives, and the `Change` of a state that caused it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from synchronizer import Revision

#: The cause of the first notification of a new listener.
PRESENT_VALUE: Final = "present value"
#: The cause of a notification that stands for several changes.
SEVERAL_CHANGES: Final = "several changes"
#: The cause of a notification that no entry of the log causes: the notifier has observed something else.
OBSERVATION: Final = "observation"


class Change(BaseModel):
    """One change of a state, as recorded in its log.

    ``cause`` lists the tags of the updates ("add, add"), or is `PRESENT_VALUE` or `SEVERAL_CHANGES`. ``updates`` are
    the updates themselves, for ``detect``; they are not part of the JSON form. With ``gap``, changes before this one
    were not seen one by one. If it stands for these as well, the cause is `SEVERAL_CHANGES` or `PRESENT_VALUE`, and
    there are no updates.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    revision: Revision
    cause: str
    seen_at: AwareDatetime
    gap: bool = False
    #: The index of a notification among those that one notifier publishes for the revision.
    index: int = 0
    updates: tuple[Any, ...] = Field(default=(), exclude=True, repr=False)


@dataclass(frozen=True, order=True, slots=True)
class NotificationKey:
    """Identifies a notification: the same at every delivery, in every process and for every listener."""

    revision: Revision
    index: int
    kind: str  # the name of its class


class Notification(BaseModel):
    """A past fact about a source. Subclasses add fields: ``Milestone(change=change, value=100)``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    change: Change

    @property
    def source(self) -> str:
        """The subject of the notification, such as the name of a reader group."""
        return self.change.source

    @property
    def revision(self) -> Revision:
        """The revision of the source's state that made it true."""
        return self.change.revision

    @property
    def cause(self) -> str:
        """The tags of the updates that made it true, or `PRESENT_VALUE` or `SEVERAL_CHANGES`."""
        return self.change.cause

    @property
    def seen_at(self) -> datetime:
        """When this process saw it, in UTC. For people to read: do not compare it between machines."""
        return self.change.seen_at

    @property
    def gap(self) -> bool:
        """Whether changes before this one were not told one by one. Its values are those of ``revision``."""
        return self.change.gap

    @property
    def key(self) -> NotificationKey:
        """The key by which a listener detects a repeated delivery. Keys of one source and class are ordered."""
        return NotificationKey(self.revision, self.change.index, type(self).__name__)

    def after_gap(self) -> Self:
        """Return this notification with ``gap=True``."""
        return self._with_change(gap=True)

    def at(self, index: int) -> Self:
        """Return this notification with this index among those of its revision."""
        return self._with_change(index=index) if index else self

    def _with_change(self, **fields: Any) -> Self:
        return self.model_copy(update={"change": self.change.model_copy(update=fields)})
