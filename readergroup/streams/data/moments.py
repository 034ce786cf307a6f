"""Times as a block stores them: microseconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from synchronizer import InvalidArgumentError

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_FIRST: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_LAST: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND


def microseconds_of(time: object, name: str) -> int:
    """Return the time as a block stores it. Raise `InvalidArgumentError` for anything but an aware datetime."""
    if not isinstance(time, datetime) or time != time:
        raise _wrong(time, f"{name} must be a datetime with a timezone, such as datetime.now(UTC)")
    if time.utcoffset() is None:
        raise _wrong(time, f"{name} needs a timezone, such as that of datetime.now(UTC)")
    microseconds = (time - _EPOCH) // _MICROSECOND
    if not _FIRST <= microseconds <= _LAST:
        raise _wrong(time, f"{name} must be in the years 1 to 9999 in UTC")
    return microseconds


def _wrong(time: object, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, found=repr(time)[:100])


def time_of(microseconds: int) -> datetime:
    """Return the time, in UTC."""
    return _EPOCH + timedelta(microseconds=microseconds)
