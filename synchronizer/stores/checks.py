"""The checks that every backend makes before it writes, with the same errors in all of them.

Backends of other distributions use it too: ``from synchronizer.stores import checks``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from ..arguments import check_count, check_names, check_type
from ..errors import (
    AlreadyExistsError,
    ClosedError,
    InvalidArgumentError,
    NotFoundError,
    SealedError,
    TruncatedError,
)
from ..store import (
    ANY,
    MAX_APPEND_BYTES,
    MAX_ATTRIBUTE_CHANGES,
    MAX_CREATED,
    MAX_CREATED_BYTES,
    MAX_NAME_LENGTH,
    MAX_START_OFFSET,
    Append,
    AttributeChange,
    SegmentCopy,
)

_NOT_TEXT: Final = re.compile("[\0\ud800-\udfff]")


def check_open(process_id: int, is_closed: bool, url: str) -> None:
    """Raise `ClosedError` after ``close``, or in a forked child of ``process_id``, which opened the store."""
    if os.getpid() != process_id:
        raise ClosedError(
            "the store belongs to the parent process; open it after the fork, or start this process with "
            "'spawn' or 'forkserver'",
            url=url,
        )
    if is_closed:
        raise ClosedError("the store is closed; open another", url=url)


def check_name(name: str, what: str = "segment") -> None:
    """Raise `InvalidArgumentError` if ``name`` cannot be the name of a segment or an attribute in every backend."""
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"the name of a {what} must be a non-empty str", name=name)
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidArgumentError(
            f"the name of a {what} is too long; shorten it", length=len(name), limit=MAX_NAME_LENGTH
        )
    if ("\0" in name) if name.isascii() else _NOT_TEXT.search(name):  # most are ASCII, where this is much faster
        raise InvalidArgumentError(f"the name of a {what} contains characters that are not text", name=name)


def check_prefix(prefix: str) -> None:
    if prefix != "":
        check_name(prefix, "segment or attribute prefix")


def check_attributes(segment: str, prefix: str, names: Collection[str] | None) -> None:
    check_name(segment)
    check_prefix(prefix)
    if isinstance(names, str):
        raise InvalidArgumentError("names must be a collection of names, not one name", segment=segment, names=names)
    check_type(names, Collection, "names", or_none=True)
    for name in names or ():
        check_name(name, "attribute")


def check_offset(segment: str, offset: int) -> None:
    """Raise `InvalidArgumentError` if ``offset`` cannot be an offset of any segment."""
    if not isinstance(offset, int) or isinstance(offset, bool):
        raise InvalidArgumentError("an offset must be an int", segment=segment, offset=offset)
    if offset < 0:
        raise InvalidArgumentError("an offset must not be negative", segment=segment, offset=offset)


def check_truncate(segment: str, offset: int) -> None:
    check_name(segment)
    check_offset(segment, offset)


def check_read_call(segment: str, offset: int, max_bytes: int) -> None:
    check_name(segment)
    check_offset(segment, offset)
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
        raise InvalidArgumentError("max_bytes must be an int >= 1", segment=segment, max_bytes=max_bytes)


def check_infos(segments: Collection[str]) -> None:
    check_names(segments)
    for segment in segments:
        check_name(segment)


def check_read_starts(segments: Collection[str], max_bytes: int) -> None:
    check_names(segments)
    for segment in segments:
        check_read_call(segment, 0, max_bytes)


def check_wait(known: Mapping[str, int], timeout: float) -> None:
    check_type(known, Mapping, "known")
    for segment, length in known.items():
        check_name(segment)
        if not isinstance(length, int) or isinstance(length, bool):
            raise InvalidArgumentError("a length must be an int", segment=segment, length=length)
    check_timeout(timeout)


def check_fair_lock(segment: str, timeout: float, patience: float) -> None:
    check_name(segment)
    check_timeout(timeout)
    check_timeout(patience)


def check_timeout(timeout: float) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout != timeout:
        raise InvalidArgumentError("a timeout must be a number of seconds", timeout=timeout)


def check_append(
    segment: str, data: bytes, expected_offset: int | None, attributes: Mapping[str, AttributeChange] | None
) -> None:
    check_name(segment)
    if not isinstance(data, bytes):
        raise InvalidArgumentError("the data of an append must be bytes", segment=segment, type=type(data).__name__)
    if len(data) > MAX_APPEND_BYTES:
        raise InvalidArgumentError(
            "the data is too large for one append; split it", segment=segment, bytes=len(data), limit=MAX_APPEND_BYTES
        )
    if expected_offset is not None:
        check_offset(segment, expected_offset)
    if attributes is None:
        return
    check_type(attributes, Mapping, "attributes")
    _check_number_of_changes(len(attributes))
    for name, change in attributes.items():
        check_name(name, "attribute")
        if not isinstance(change, AttributeChange):
            raise InvalidArgumentError(
                "the change of an attribute must be an AttributeChange", segment=segment, attribute=name
            )
        if not isinstance(change.new, bytes | None) or not (
            change.expected is ANY or isinstance(change.expected, bytes | None)
        ):
            raise InvalidArgumentError(
                "the value of an attribute must be bytes or None", segment=segment, attribute=name
            )


def _check_number_of_changes(number: int) -> None:
    if number > MAX_ATTRIBUTE_CHANGES:
        raise InvalidArgumentError(
            "too many attributes for one append; split them", attributes=number, limit=MAX_ATTRIBUTE_CHANGES
        )


def check_create(segment: str, start_offset: int) -> None:
    check_name(segment)
    check_count(start_offset, "start_offset", at_least=0, at_most=MAX_START_OFFSET)


def check_forget(segment: str, expected_offset: int | None) -> None:
    check_name(segment)
    check_count(expected_offset, "expected_offset", at_least=0, or_none=True)


def check_create_together(segments: Mapping[str, bytes], start_offsets: Mapping[str, int] | None) -> Mapping[str, int]:
    """Return the first offset of each segment."""
    check_type(segments, Mapping, "segments")
    check_type(start_offsets, Mapping, "start_offsets", or_none=True)
    given = start_offsets or {}
    for name, start_offset in given.items():
        check_count(start_offset, "each of start_offsets", at_least=0, at_most=MAX_START_OFFSET)
        if name not in segments:
            raise InvalidArgumentError("start_offsets has a segment that is not created", segment=name)
    for name, data in segments.items():
        check_append(name, data, None, None)
    if len(segments) > MAX_CREATED:
        raise InvalidArgumentError(
            "too many segments to create in one step; split them", segments=len(segments), limit=MAX_CREATED
        )
    size = sum(map(len, segments.values()))
    if size > MAX_CREATED_BYTES:
        raise InvalidArgumentError(
            "the data is too large to create segments with; append it", bytes=size, limit=MAX_CREATED_BYTES
        )
    return {**dict.fromkeys(segments, 0), **given}


def all_are_new(known: Mapping[str, bool]) -> bool:
    """Return whether segments can be created together. Raise `AlreadyExistsError` if one of them was deleted.

    ``known`` has those that were ever created, and whether they were deleted.
    """
    for name, is_deleted in known.items():
        if is_deleted:
            raise name_is_used_up(name)
    return not known


def check_appends(appends: Sequence[Append]) -> None:
    check_type(appends, Sequence, "appends")
    for part in appends:
        check_type(part, Append, "each item of appends")
        check_append(part.segment, part.data, part.expected_offset, part.attributes)
    segments = [part.segment for part in appends]
    if len(set(segments)) < len(segments):
        raise InvalidArgumentError("a segment occurs twice in the appends; join its parts", segments=segments)
    size = sum(len(part.data) for part in appends)
    if size > MAX_APPEND_BYTES:
        raise InvalidArgumentError(
            "the data is too large for one atomic append; split it", bytes=size, limit=MAX_APPEND_BYTES
        )
    _check_number_of_changes(sum(len(part.attributes) for part in appends))


def check_concat(
    segment: str, source: str, expected_offset: int | None, attributes: Mapping[str, AttributeChange] | None
) -> None:
    check_append(segment, b"", expected_offset, attributes)
    check_name(source)
    if segment == source:
        raise InvalidArgumentError("a segment cannot be appended to itself; name another source", segment=segment)


def check_source(source: str, is_sealed: bool) -> None:
    if not is_sealed:
        raise InvalidArgumentError("only a sealed segment can be appended to another; seal it first", source=source)


def check_copies(copies: Sequence[SegmentCopy]) -> None:
    check_type(copies, Sequence, "copies")
    for each in copies:
        check_type(each, SegmentCopy, "each item of copies")
        check_name(each.source)
        check_name(each.segment)
        check_offset(each.segment, each.start)
        check_offset(each.segment, each.end)
        if each.start > each.end:
            raise InvalidArgumentError(
                "the end of a copy must not be before its start",
                segment=each.segment,
                start=each.start,
                end=each.end,
            )
    made = [each.segment for each in copies]
    if len(set(made)) < len(made) or not {each.source for each in copies}.isdisjoint(made):
        raise InvalidArgumentError("every copy needs a new segment of its own, which is not a source", segments=made)


def are_new(copies: Sequence[SegmentCopy], known: Mapping[str, bool]) -> bool:
    """Return whether to create the segments; False if all exist. Raise `AlreadyExistsError` if only some do.

    ``known`` has those that were ever created, and whether they were deleted. A deleted one raises as well.
    """
    is_new = all_are_new(known)
    if known and len(known) < len(copies):
        raise AlreadyExistsError("some of these segments exist; choose names that are all new", segment=min(known))
    return is_new


def check_copy(copy: SegmentCopy, start_offset: int, length: int) -> None:
    """Raise `TruncatedError` or `InvalidArgumentError` for bytes that the source does not have."""
    check_read(copy.source, copy.start, 1, start_offset, length)
    check_within(copy.source, copy.end, length)


def check_read(segment: str, offset: int, max_bytes: int, start_offset: int, length: int) -> None:
    if max_bytes < 1:
        raise InvalidArgumentError("max_bytes must be an int >= 1", segment=segment, max_bytes=max_bytes)
    if offset < 0:
        raise InvalidArgumentError("an offset must not be negative", segment=segment, offset=offset)
    if offset < start_offset:
        raise TruncatedError(
            "the data before the segment's start was truncated; continue from start_offset",
            segment=segment,
            offset=offset,
            start_offset=start_offset,
        )
    check_within(segment, offset, length)


def check_within(segment: str, offset: int, length: int) -> None:
    if offset < 0:
        raise InvalidArgumentError("an offset must not be negative", segment=segment, offset=offset)
    if offset > length:
        raise InvalidArgumentError(
            "the offset is beyond the end of the segment", segment=segment, offset=offset, length=length
        )


def not_found(segment: str) -> NotFoundError:
    return NotFoundError("the segment does not exist or was deleted; create it first", segment=segment)


def name_is_used_up(segment: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        "a segment of this name was deleted, and names are not reused; choose another name", segment=segment
    )


def sealed(segment: str, length: int) -> SealedError:
    return SealedError("the segment is sealed and takes no further appends", segment=segment, length=length)
