"""Tells whether a value was read back as it was given."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from datetime import datetime, time
from functools import partial
from math import isnan
from typing import Any

from pydantic import BaseModel


def is_equal(read: Any, given: Any, *, exact: bool = True, nan: bool = True) -> bool:
    """As ``==``, wherever in the value, but a time of day that a clock shows twice is equal to itself.

    If it need not be ``exact``, the tuple that is read back is equal to a list or a set of the same items.
    With ``nan``, NaN is equal to itself.
    """
    if read == given:
        return True
    if exact and type(read) is not type(given):
        return False
    same = partial(is_equal, exact=exact, nan=nan)
    match read, given:
        case float(), float():
            return nan and isnan(read) and isnan(given)
        case (datetime(), datetime()) | (time(), time()):
            return bool(read.isoformat() == given.isoformat())
        case tuple() | list(), tuple() | list():
            return len(read) == len(given) and all(map(same, read, given))
        case tuple() | list(), Set():
            return len(read) == len(given) and all(item in given for item in read)
        case Mapping(), Mapping():
            return read.keys() == given.keys() and all(same(read[key], given[key]) for key in read)
    if type(read) is not type(given):
        return False
    if is_dataclass(read):
        names = [each.name for each in fields(read)]
    elif isinstance(read, BaseModel):
        names = [name for name, field in type(read).model_fields.items() if exact or not field.exclude]
    else:
        return False
    return all(same(getattr(read, name), getattr(given, name)) for name in names)
