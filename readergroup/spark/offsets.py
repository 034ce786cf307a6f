"""Converts between a stream cut and the offset of a streaming query, which Spark stores in the checkpoint.

Spark compares offsets as text, so a cut has exactly one form: the JSON of the cut with a version. You can pass an
offset from a checkpoint as ``startingOffsets``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from synchronizer import InvalidArgumentError

from ..streams.config import SegmentId, StreamCut, number_of

VERSION: Final = 1


def offset_of(cut: StreamCut) -> dict[str, Any]:
    """Return the offset of the cut; ``json.dumps`` writes the same text for the same cut."""
    return {"v": VERSION, **cut.model_dump(mode="json")}


def report_of(cut: StreamCut, lengths: Mapping[SegmentId, int]) -> dict[str, Any]:
    """Return the value to report as the newest offset: the lengths of the segments from the cut on."""
    ordered = {segment: lengths[segment] for segment in sorted(lengths, key=number_of)}
    return {"v": VERSION, "stream": cut.stream, "incarnation": cut.incarnation, "lengths": ordered}


def cut_of(offset: Mapping[str, Any] | str) -> StreamCut:
    """Return the cut of an offset, or of a cut's own JSON. Raise for anything else."""
    try:
        fields = json.loads(offset) if isinstance(offset, str) else dict(offset)
    except ValueError as error:
        raise InvalidArgumentError("the offset is not JSON", text=offset) from error
    if not isinstance(fields, dict):
        raise InvalidArgumentError("the offset is not a cut", text=offset)
    check_version(fields)
    fields.pop("v", None)
    return StreamCut.model_validate(fields)


def check_version(offset: Mapping[str, Any]) -> None:
    """Raise for an offset of another version, as a later release may write it."""
    version = offset.get("v", VERSION)
    if version != VERSION:
        raise InvalidArgumentError(
            "the format of the offset is unknown to this release; run the query with the release that wrote it, "
            "or with a new checkpoint and startingOffsets",
            version=version,
            known=VERSION,
        )
