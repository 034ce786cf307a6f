"""Checks of arguments, in one place for all three packages: types, durations and counts.

Python accepts any argument and fails far from the call: "5" fails at the first calculation, None at the first method
call. Comparisons with NaN are false, and True counts as 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Final, TypeGuard

from .errors import InvalidArgumentError

_LARGEST_COUNT: Final = 2**63 - 1


def check_type(value: object, kind: type, name: str, *, or_none: bool = False) -> None:
    """Raise `InvalidArgumentError` if ``value`` is no ``kind``. It shows the type only: the value may be a secret."""
    if isinstance(value, kind) or (value is None and or_none):
        return
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    raise InvalidArgumentError(
        f"{name} must be {article} {kind.__name__}{' or None' * or_none}", found=type_name(value)
    )


def check_items(values: object, kind: type, name: str, *, or_none: bool = False) -> None:
    """Raise `InvalidArgumentError` if ``values`` does not hold items, as `holds_items` says."""
    if not holds_items(values, kind) and not (values is None and or_none):
        raise InvalidArgumentError(
            f"{name} must be a list or another {kind.__name__}{', or None' * or_none}; put a single value into a list",
            found=type_name(values),
        )


def check_names(segments: object) -> None:
    """Raise `InvalidArgumentError` if ``segments`` is no collection, or one name, whose letters would be the names."""
    check_type(segments, Collection, "segments")
    if isinstance(segments, str):
        raise InvalidArgumentError("segments must be a collection of names, not one name", segments=segments)


def holds_items(values: object, kind: type) -> TypeGuard[Iterable[object]]:
    """Return whether ``values`` is a ``kind`` of items, such as an Iterable, and no single value.

    Python would take the letters of a text, the numbers of bytes and the keys of a mapping for the items.
    """
    return isinstance(values, kind) and not isinstance(values, str | bytes | bytearray | memoryview | Mapping)


def type_name(value: object) -> str:
    """Return the name of the type of ``value``, or say which class it is, for an error."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_class(value: object, kind: type, name: str) -> None:
    """Raise `InvalidArgumentError` if ``value`` is not ``kind`` or a class derived from it."""
    if not isinstance(value, type) or not issubclass(value, kind):
        found = value.__name__ if isinstance(value, type) else type(value).__name__
        raise InvalidArgumentError(f"{name} must be a class derived from {kind.__name__}", found=found)


def check_duration(
    seconds: object, name: str, *, above_zero: bool = False, finite: bool = False, or_none: bool = False
) -> None:
    """Raise `InvalidArgumentError` if ``seconds`` is no number from 0 on. Infinity means forever, unless ``finite``."""
    if seconds is None and or_none:
        return
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    limit = ""
    try:
        number = float(seconds) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:  # an integer or a fraction
        number, limit = math.nan, f" and <= {sys.float_info.max:.1e}"
    # NaN is neither above 0 nor equal to it.
    if not (number > 0 or (number == 0 and not above_zero)) or (finite and math.isinf(number)):
        bounds = ("> 0" if above_zero else ">= 0") + limit
        raise InvalidArgumentError(
            f"{name} must be a {'finite ' * finite}number of seconds {bounds}{', or None' * or_none}",
            **{name: seconds},
        )


def check_count(
    number: object, name: str, *, at_least: int = 1, at_most: int = _LARGEST_COUNT, or_none: bool = False
) -> None:
    """Raise `InvalidArgumentError` if ``number`` is no whole number from ``at_least`` to ``at_most``."""
    if number is None and or_none:
        return
    is_whole = isinstance(number, Integral) and not isinstance(number, bool)
    if not is_whole or not at_least <= number <= at_most:  # type: ignore[operator]
        shows_most = at_most != _LARGEST_COUNT or (is_whole and number > at_most)  # type: ignore[operator]
        bounds = f"from {at_least} to {at_most}" if shows_most else f">= {at_least}"
        raise InvalidArgumentError(f"{name} must be an integer {bounds}{', or None' * or_none}", **{name: number})
