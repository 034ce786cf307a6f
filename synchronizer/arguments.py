"""Checks of what callers give as durations and counts, in one place for all three packages.

Python compares NaN with everything and finds nothing, takes True for 1, and fails on "5" far from where it was given.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Final

from .errors import InvalidArgumentError

_LARGEST_COUNT: Final = 2**63 - 1


def check_duration(
    seconds: object, name: str, *, above_zero: bool = False, finite: bool = False, or_none: bool = False
) -> None:
    """Refuse what is no number of seconds from 0 on. Infinity means for ever, where it is not to be ``finite``."""
    if seconds is None and or_none:
        return
    # NaN is neither above 0 nor equal to it.
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not is_number or not (seconds > 0 or (seconds == 0 and not above_zero)) or (finite and math.isinf(seconds)):  # type: ignore[operator,arg-type]
        bounds = "above 0" if above_zero else "from 0 on"
        raise InvalidArgumentError(
            f"{name} is a number of seconds {bounds}{', and finite' * finite}{', or None' * or_none}",
            **{name: seconds},
        )


def check_count(
    number: object, name: str, *, at_least: int = 1, at_most: int = _LARGEST_COUNT, or_none: bool = False
) -> None:
    """Refuse what is no whole number from ``at_least`` on."""
    if number is None and or_none:
        return
    is_whole = isinstance(number, Integral) and not isinstance(number, bool)
    if not is_whole or not at_least <= number <= at_most:  # type: ignore[operator]
        bounds = f"from {at_least} on" if at_most == _LARGEST_COUNT else f"from {at_least} to {at_most}"
        raise InvalidArgumentError(f"{name} is a whole number {bounds}{', or None' * or_none}", **{name: number})
