"""One segment in the state of a group, and what the values of a state have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, model_serializer

from readergroup.streams.config import SegmentId


class Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    _defaults: ClassVar[Mapping[str, object]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        cls._defaults = {name: field.default for name, field in cls.model_fields.items()}

    @model_serializer
    def _leave_defaults_out(self) -> dict[str, object]:
        """There are thousands of these in a state, and most of their fields are not used."""
        defaults = self._defaults
        return {name: value for name, value in self.__dict__.items() if value != defaults[name]}


class SegmentState(Value):
    """A segment that the group reads, will read, or has read while its successors are not readable yet."""

    low: float
    high: float
    #: Where its next owner starts; or its owner started, or last passed a checkpoint; or where it was completed.
    offset: int = 0
    owner: str | None = None
    #: The fencing token of the present assignment.
    token: int | None = None
    #: The reader, and its incarnation, that gets the segment when the owner releases it.
    target: str | None = None
    target_incarnation: int | None = None
    #: How many of its predecessors have to be completed before it may be read; while some have, all of them.
    waiting_for: int = 0
    predecessors: tuple[SegmentId, ...] = ()
    successors: tuple[SegmentId, ...] = ()
    completed: bool = False
    #: The group reads it up to here, if the config sets an end cut.
    end: int | None = None
    #: How much work the segment is, as a power of two.
    weight: int = 0

    @property
    def readable(self) -> bool:
        """Whether the segment may have an owner now."""
        return not self.completed and not self.waiting_for

    @property
    def holder(self) -> str | None:
        """The reader that is to read it: its target, else its owner."""
        return self.target or self.owner

    @property
    def unassigned(self) -> bool:
        return self.owner is None and self.readable

    @property
    def newest(self) -> bool:
        """Whether it is to be read, and nothing that comes after it is known."""
        return not self.completed and not self.successors

    @property
    def load(self) -> int:
        """How much work the segment is."""
        return 1 << self.weight

    def changed(self, **changes: object) -> SegmentState:
        return self.model_copy(update=changes)
