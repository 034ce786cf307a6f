"""Checkpoints of a reader group: a cut of its streams that agrees with what every reader saved when it passed.

A checkpoint is a barrier in each segment. Events before the checkpoint's position in a segment were handed out by
readers that had not passed the checkpoint; events after it, by readers that had. So a reader that saves its results
when it passes has saved the events before the cut, and none of those after it.

Checkpoints, assignments of segments and incarnations of readers are all numbered by the revisions that made them. A
segment has passed the checkpoints that are older than its assignment, and those that its owner has passed. Its position
is recorded once: at the beginning, as known, if the segment has no owner; when its owner passes; or, if the owner
releases it earlier, at the release. The next owner has to pass the checkpoint before it hands out the first event.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Final

from pydantic import BaseModel, ConfigDict

from readergroup.streams.config import SegmentId, StreamCut
from synchronizer import Map

#: The prefix in the name of an automatic checkpoint. The number after it is never reused.
AUTOMATIC: Final = "automatic-"


class Checkpoint(BaseModel):
    """A completed checkpoint: the group continues from it after a reset to it.

    Text form: ``model_dump_json()``. ``cuts`` can bound other groups and batch jobs as well.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    group: str
    name: str
    #: Grows with each checkpoint of the group.
    number: int
    cuts: Mapping[str, StreamCut]
    #: Whether the SDK took it without a call.
    automatic: bool = False
    #: How many readers with ``on_checkpoint`` were declared dead, removed or replaced before it was completed, after
    #: they had committed something since the group was created or last reset. Their unsaved results are lost.
    lost: int = 0


class CheckpointState(BaseModel):
    """An outstanding or completed checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    #: The token of the revision that began it.
    token: int
    automatic: bool = False
    #: Calls no ``on_checkpoint``: it serves `generate_stream_cuts`.
    silent: bool = False
    #: The readers that were in the group when it began and have not passed it.
    waiting: frozenset[str] = frozenset()
    #: The cut. If a segment's owner has not passed, its offset is the one known when the checkpoint began.
    offsets: Map[SegmentId, int] = Map()
    #: Copied from the state when it was completed.
    lost: int = 0

    @property
    def completed(self) -> bool:
        return not self.waiting

    def with_position(self, reader: str, token: int, segment: SegmentId, offset: int) -> CheckpointState:
        """Record where the reader, owner of the segment under this token, passes the checkpoint or releases it."""
        is_recorded = reader not in self.waiting or token > self.token
        return self if is_recorded else self.model_copy(update={"offsets": self.offsets.set(segment, offset)})

    def without(self, reader: str) -> CheckpointState:
        """Stop waiting for a reader that has passed, or left."""
        if reader not in self.waiting:
            return self
        return self.model_copy(update={"waiting": self.waiting - {reader}})


Checkpoints = tuple[CheckpointState, ...]


def kept(checkpoints: Checkpoints, number: int) -> Checkpoints:
    """Return the checkpoints that a state keeps: all outstanding ones; the last ``number`` completed ones that were
    requested, by name; and the last that was automatic, that was silent, and before which no reader was lost.
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
