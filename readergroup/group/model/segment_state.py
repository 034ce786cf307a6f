"""One segment in the state of a group, and the base class of the state's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, model_serializer

from readergroup.streams.config import SegmentId


class GroupValue(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    _defaults: ClassVar[Mapping[str, object]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        cls._defaults = {name: field.default for name, field in cls.model_fields.items()}

    @model_serializer
    def _leave_defaults_out(self) -> dict[str, object]:
        """Write only fields that differ from their defaults: a state holds thousands of values, mostly of defaults."""
        defaults = self._defaults
        return {name: value for name, value in self.__dict__.items() if value != defaults[name]}


class SegmentState(GroupValue):
    """A segment that the group reads, will read, or has read while its successors are not readable yet."""

    low: float
    high: float
    #: Unassigned: where the next owner starts. Owned: where the owner started or last passed a checkpoint. Completed:
    #: where the segment was completed.
    offset: int = 0
    owner: str | None = None
    #: The fencing token of the present assignment.
    token: int | None = None
    #: The reader, and its incarnation, that gets the segment when the owner releases it.
    target: str | None = None
    target_incarnation: int | None = None
    #: How many predecessors are not completed. The segment is readable at 0; until then ``predecessors`` has them all.
    waiting_for: int = 0
    predecessors: tuple[SegmentId, ...] = ()
    successors: tuple[SegmentId, ...] = ()
    completed: bool = False
    #: Where the group stops reading it, if the config sets an end cut.
    end: int | None = None
    #: How much work the segment is, as a power of two.
    weight: int = 0

    @property
    def readable(self) -> bool:
        """Whether the segment may have an owner now."""
        return not self.completed and not self.waiting_for

    @property
    def planned_owner(self) -> str | None:
        """The owner after the present hand-over, if there is one: the target, else the owner."""
        return self.target or self.owner

    @property
    def unassigned(self) -> bool:
        return self.owner is None and self.readable

    @property
    def newest(self) -> bool:
        """Whether the segment is not completed and has no known successor."""
        return not self.completed and not self.successors

    @property
    def load(self) -> int:
        """How much work the segment is."""
        return 1 << self.weight

    def changed(self, **changes: object) -> SegmentState:
        return self.model_copy(update=changes)
