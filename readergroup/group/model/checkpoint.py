"""Checkpoints of a reader group: a cut of its streams that agrees with what every reader has kept at it.

A checkpoint is a barrier in each segment. What was handed out of a segment before the checkpoint's position in it was
handed out by readers that had not passed the checkpoint; what comes after, by readers that had. So a reader that keeps
its results when it passes has kept the events before the cut, and none of those after it.

Checkpoints, assignments of segments and lives of readers are all numbered by the revisions that made them. A segment
has passed the checkpoints that are older than its assignment, and those that its owner has passed. Its position is
recorded once: as it is known at the beginning if nobody owns it; when its owner passes; or, if the owner gives it up
before, where it does. Whoever gets it then has to pass before it hands out the first event.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Final

from pydantic import BaseModel, ConfigDict

from readergroup.streams.config import SegmentId, StreamCut
from synchronizer import Map

#: How an automatic checkpoint is named; its number is never used again.
AUTOMATIC: Final = "automatic-"


class Checkpoint(BaseModel):
    """A completed checkpoint: where its group goes on from if it is reset to it.

    Text form: ``model_dump_json()``. ``cuts`` bound other groups and batch jobs as well.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    group: str
    name: str
    #: Grows from checkpoint to checkpoint of the group.
    number: int
    cuts: Mapping[str, StreamCut]
    #: The SDK took it by itself.
    automatic: bool = False
    #: How many readers with ``on_checkpoint`` were declared dead, removed or replaced before it was completed, after
    #: they had committed something since the group was created or last reset: what they had of that, nobody has kept.
    lost: int = 0


class CheckpointState(BaseModel):
    """A checkpoint that is under way, or completed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    #: The token of the revision that began it.
    token: int
    automatic: bool = False
    #: No application is told of it: somebody wants to know where the group is.
    silent: bool | None = None
    #: The readers that were there when it began and have not passed it.
    waiting: frozenset[str] = frozenset()
    #: The cut. Where a segment's owner has not passed, that is where it was known to be when the checkpoint began.
    offsets: Map[SegmentId, int] = Map()
    #: As of the state, when it was completed.
    lost: int | None = None

    @property
    def completed(self) -> bool:
        return not self.waiting

    def with_position(self, reader: str, token: int, segment: SegmentId, offset: int) -> CheckpointState:
        """The reader, which has had the segment under this token, passes the checkpoint, or gives the segment up."""
        is_recorded = reader not in self.waiting or token > self.token
        return self if is_recorded else self.model_copy(update={"offsets": self.offsets.set(segment, offset)})

    def without(self, reader: str) -> CheckpointState:
        """The reader has passed, or left."""
        if reader not in self.waiting:
            return self
        return self.model_copy(update={"waiting": self.waiting - {reader}})


Checkpoints = tuple[CheckpointState, ...]


def kept(checkpoints: Checkpoints, number: int) -> Checkpoints:
    """Those that a state keeps: all that are under way; and of the completed ones the last ``number`` that were asked
    for, by their names, the last automatic one, the last one before which no reader was lost, and the last silent one.
    """
    completed = [each for each in reversed(checkpoints) if each.completed]
    told = [each for each in completed if not each.silent]
    by_name: dict[str, CheckpointState] = {}
    for each in told:
        if not each.automatic:
            by_name.setdefault(each.name, each)
    wanted = [
        *islice(by_name.values(), number),
        *islice((each for each in told if each.automatic), 1),
        *islice((each for each in told if not each.lost), 1),
        *islice((each for each in completed if each.silent), 1),
    ]
    tokens = {each.token for each in wanted}
    return tuple(each for each in checkpoints if not each.completed or each.token in tokens)
