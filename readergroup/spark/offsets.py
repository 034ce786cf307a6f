"""Converts between cuts and the offset of a streaming query, which Spark stores in the checkpoint.

Spark compares offsets as text, so the same cuts have exactly one form: version 1 is the JSON of one cut, for a query
that names one stream, and version 2 a list of cuts, for all other queries. You can pass an offset from a checkpoint as
``startingOffsets``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from synchronizer import InvalidArgumentError

from ..streams.config import SegmentId, StreamCut, by_number

#: Cuts of different streams, by their names.
Cuts = Mapping[str, StreamCut]

VERSION: Final = 1
#: The version of the offset of several streams.
VERSION_OF_SEVERAL: Final = 2


def offset_of(cut: StreamCut) -> dict[str, Any]:
    """Return the offset of the cut; ``json.dumps`` writes the same text for the same cut."""
    return {"v": VERSION, **cut.model_dump(mode="json")}


def offset_of_several(cuts: Cuts) -> dict[str, Any]:
    """Return the offset of the cuts, as `offset_of` does."""
    return {"v": VERSION_OF_SEVERAL, "cuts": [cuts[stream].model_dump(mode="json") for stream in sorted(cuts)]}


def report_of(offset: Mapping[str, Any], lengths: Mapping[SegmentId, int]) -> dict[str, Any]:
    """Return the value to report as the newest offset: the lengths of the segments from this offset on."""
    named = {name: offset[name] for name in ("v", "stream", "incarnation") if name in offset}
    return {**named, "lengths": dict(by_number(lengths))}


def cuts_of(offset: Mapping[str, Any] | str) -> Cuts:
    """Return the cuts of an offset, or of a cut's own JSON. Raise for anything else."""
    try:
        fields = json.loads(offset) if isinstance(offset, str) else offset
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError("the offset is not JSON", text=offset) from error
    if not isinstance(fields, Mapping):
        raise InvalidArgumentError("the offset is not a cut", text=offset)
    version = check_version(fields, VERSION_OF_SEVERAL)
    rest = {name: value for name, value in fields.items() if name != "v"}
    if version == VERSION:
        cut = _cut_of(rest)
        return {cut.stream: cut}
    if rest.keys() != {"cuts"} or not isinstance(rest["cuts"], list):
        raise InvalidArgumentError("the offset is not a list of cuts", text=offset)
    cuts = [_cut_of(each) for each in rest["cuts"]]
    if len({cut.stream for cut in cuts}) != len(cuts):
        raise InvalidArgumentError("the offset has several cuts of one stream", text=offset)
    return {cut.stream: cut for cut in cuts}


def _cut_of(fields: object) -> StreamCut:
    try:
        return StreamCut.model_validate(fields)
    except ValidationError as error:
        raise InvalidArgumentError(
            "the offset has a damaged cut; restore the checkpoint, or start with a new one and startingOffsets",
            cut=fields,
            reason=error.errors()[0]["msg"],
        ) from error


def check_version(offset: Mapping[str, Any], newest: int) -> int:
    """Return the version. Raise for a later one than ``newest``, as a later release may write it."""
    version = offset.get("v", VERSION)
    if type(version) is not int or not VERSION <= version <= newest:
        raise InvalidArgumentError(
            "the format of the offset is unknown to this release; run the query with the release that wrote it, "
            "or with a new checkpoint and startingOffsets",
            version=version,
            known=newest,
        )
    return version
