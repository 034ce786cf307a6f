"""Times as a block stores them: microseconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from synchronizer import InvalidArgumentError

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def microseconds_of(time: object, name: str) -> int:
    """Return the time as a block stores it. Raise `InvalidArgumentError` for anything but an aware datetime."""
    if not isinstance(time, datetime):
        raise InvalidArgumentError(
            f"{name} must be a datetime with a timezone, such as datetime.now(UTC)", found=repr(time)[:100]
        )
    if time.utcoffset() is None:
        raise InvalidArgumentError(
            f"{name} needs a timezone, such as that of datetime.now(UTC)", found=repr(time)[:100]
        )
    return (time - _EPOCH) // _MICROSECOND


def time_of(microseconds: int) -> datetime:
    """Return the time, in UTC."""
    return _EPOCH + timedelta(microseconds=microseconds)
