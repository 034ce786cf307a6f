"""Times on the command line."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from synchronizer import SystemClock

from .retention import age
from .session import WrongUsage

TIME_HELP: Final = "a time such as 2026-11-22T09:00+00:00, or how long ago, such as 2h"


def shown_time(time: datetime, timespec: str = "seconds") -> str:
    """Return a time as all commands print it and their options take it: in UTC, such as ``2026-11-22T09:00:00Z``."""
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec=timespec) + "Z"


def parse_time(option: str, text: str, *, or_use: str = "") -> datetime:
    """Return the time that the option names, or that lies so long ago. An error also names what else to use."""
    others = f"; or use {or_use}" if or_use else ""
    try:
        ago: timedelta | None = age(option, text)
    except WrongUsage:
        ago = None
    try:
        found = (
            datetime.fromtimestamp(SystemClock().time(), UTC) - ago if ago is not None else datetime.fromisoformat(text)
        )
    except (OverflowError, ValueError) as error:
        raise WrongUsage(f"{option} takes {TIME_HELP}, not {text!r}{others}") from error
    if found.tzinfo is None:
        raise WrongUsage(f"{option} {text!r} needs a timezone, such as {found.isoformat()}+00:00{others}")
    return found
