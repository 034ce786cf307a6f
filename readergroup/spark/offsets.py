"""A stream cut as Spark keeps it: the offset of a streaming query, in its checkpoint.

Spark compares offsets as text, so one cut has one form. It is the JSON of the cut with a version: what stands in a
checkpoint may be given as ``startingOffsets`` too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from synchronizer import InvalidArgumentError

from ..streams.config import SegmentId, StreamCut, number_of

VERSION: Final = 1


def offset_of(cut: StreamCut) -> dict[str, Any]:
    """The offset that stands for the cut; ``json.dumps`` writes the same text for the same cut."""
    return {"v": VERSION, **cut.model_dump(mode="json")}


def report_of(cut: StreamCut, lengths: Mapping[SegmentId, int]) -> dict[str, Any]:
    """What is reported as the newest offset: how long the segments from the cut on are."""
    ordered = {segment: lengths[segment] for segment in sorted(lengths, key=number_of)}
    return {"v": VERSION, "stream": cut.stream, "incarnation": cut.incarnation, "lengths": ordered}


def cut_of(offset: Mapping[str, Any] | str) -> StreamCut:
    """The cut that the offset, or a cut's own JSON, stands for. Raises for what is neither."""
    try:
        fields = json.loads(offset) if isinstance(offset, str) else dict(offset)
    except ValueError as error:
        raise InvalidArgumentError("this is no JSON", text=offset) from error
    if not isinstance(fields, dict):
        raise InvalidArgumentError("this is no cut", text=offset)
    check_version(fields)
    fields.pop("v", None)
    return StreamCut.model_validate(fields)


def check_version(offset: Mapping[str, Any]) -> None:
    """Raises for an offset of a later release."""
    version = offset.get("v", VERSION)
    if version != VERSION:
        raise InvalidArgumentError(
            "the offset was written by a release that this one does not know; run the query with that one, or with a "
            "new checkpoint and startingOffsets",
            version=version,
            known=VERSION,
        )
