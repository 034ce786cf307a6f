"""What every backend refuses before it writes, and the words it does so with."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from ..errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    SealedError,
    TruncatedError,
)
from ..store import MAX_APPEND_BYTES, MAX_NAME_LENGTH, AttributeChange

_NOT_TEXT: Final = re.compile("[\0\ud800-\udfff]")


def check_name(name: str, what: str = "segment") -> None:
    """Refuse what cannot be the name of a segment or an attribute in every backend."""
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"the name of a {what} is a non-empty string", name=name)
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidArgumentError(
            f"the name of a {what} is too long; shorten it", length=len(name), limit=MAX_NAME_LENGTH
        )
    if _NOT_TEXT.search(name):
        raise InvalidArgumentError(f"the name of a {what} holds characters that are not text", name=name)


def check_prefix(prefix: str) -> None:
    if prefix:
        check_name(prefix, "segment or attribute, from its beginning on,")


def check_attributes(segment: str, prefix: str, names: Collection[str] | None) -> None:
    check_name(segment)
    check_prefix(prefix)
    if isinstance(names, str):
        raise InvalidArgumentError("names is a collection of names, not one of them", segment=segment, names=names)
    for name in names or ():
        check_name(name, "attribute")


def check_append(
    segment: str, data: bytes, expected_offset: int | None, attributes: Mapping[str, AttributeChange] | None
) -> None:
    check_name(segment)
    if not isinstance(data, bytes):
        raise InvalidArgumentError("the data of an append is bytes", segment=segment, type=type(data).__name__)
    if len(data) > MAX_APPEND_BYTES:
        raise InvalidArgumentError(
            "the data is too large for one append; split it", segment=segment, bytes=len(data), limit=MAX_APPEND_BYTES
        )
    if expected_offset is not None and expected_offset < 0:
        raise InvalidArgumentError("an offset is not negative", segment=segment, expected_offset=expected_offset)
    for name, change in (attributes or {}).items():
        check_name(name, "attribute")
        if not isinstance(change.new, bytes | None):
            raise InvalidArgumentError("the value of an attribute is bytes", segment=segment, attribute=name)


def check_read(segment: str, offset: int, max_bytes: int, start_offset: int, length: int) -> None:
    if max_bytes < 1:
        raise InvalidArgumentError("a read asks for at least one byte", segment=segment, max_bytes=max_bytes)
    if offset < 0:
        raise InvalidArgumentError("an offset is not negative", segment=segment, offset=offset)
    if offset < start_offset:
        raise TruncatedError(
            "the data before the segment's start is gone; continue from there",
            segment=segment,
            offset=offset,
            start_offset=start_offset,
        )
    check_within(segment, offset, length)


def check_within(segment: str, offset: int, length: int) -> None:
    if offset < 0:
        raise InvalidArgumentError("an offset is not negative", segment=segment, offset=offset)
    if offset > length:
        raise InvalidArgumentError(
            "the offset is beyond the end of the segment", segment=segment, offset=offset, length=length
        )


def not_found(segment: str) -> NotFoundError:
    return NotFoundError("the segment does not exist; create it first, or it was deleted", segment=segment)


def name_is_used_up(segment: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        "a segment of this name was deleted, and a name is not used again; take another", segment=segment
    )


def sealed(segment: str, length: int) -> SealedError:
    return SealedError("the segment is sealed and takes no further appends", segment=segment, length=length)
