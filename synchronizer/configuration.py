"""The base class of options. Its constructor checks the fields, and raises errors of this distribution."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import InvalidArgumentError, ReaderGroupError, shown

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class Configuration(BaseModel):
    """A frozen model whose constructor raises `InvalidArgumentError`, with pydantic's error as its cause.

    `model_validate`, which reads stored data, raises pydantic's own error: there the data is wrong, not an argument.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, *values: object, **fields: Any) -> None:
        name, known = type(self).__name__, type(self).model_fields
        if values:
            raise InvalidArgumentError(f"{name} takes its fields by name: {', '.join(known)}", found=values)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidArgumentError(f"{name} is invalid: {reasons(error, known)}") from error

    # Otherwise `model_validate` calls this constructor as well.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]
    __init__.__signature__ = inspect.signature(BaseModel.__init__)  # type: ignore[attr-defined]  # without ``values``


def differences(one: Configuration, other: Configuration) -> dict[str, object]:
    """Return the fields of ``one`` that differ in ``other``, for an error: of a configuration in both, these fields."""
    found = {}
    for field, value in one:
        there = getattr(other, field)
        if value != there:
            both = isinstance(value, Configuration) and isinstance(there, Configuration)
            found[field] = differences(value, there) if both else value
    return found


def reasons(error: ValidationError, known: Collection[str] = ()) -> str:
    """Return the findings of pydantic in one line: fields, reasons and values. ``known`` are the fields that exist."""
    return "; ".join(map(partial(_reason, known), error.errors()))


def _reason(known: Collection[str], found: ErrorDetails) -> str:
    place, kind = found["loc"], found["type"]
    words = _in_our_words(kind, found["msg"])
    if kind == "extra_forbidden" and len(place) == 1 and known:
        near = get_close_matches(str(place[0]), known, n=1)
        words += f"; did you mean {near[0]}?" if near else f"; the fields are {', '.join(known)}"
    reason = ": ".join(filter(None, (".".join(map(str, place)), words)))
    shows_value = isinstance(found.get("ctx", {}).get("error"), ReaderGroupError)  # as a fact
    if not place or shows_value or kind in ("missing", "extra_forbidden"):
        return reason
    return f"{reason}, not {_value_of(found['input']):.100}"


def _value_of(value: object) -> str:
    return str(value) if isinstance(value, timedelta) else shown(value)


def _in_our_words(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "there is no field of this name"
    if kind == "missing":
        return "is missing"
    if kind in ("too_short", "too_long"):  # "Value should have at least 1 item after validation, not 0"
        return re.sub(r"^\w+ should (.+) after validation, not .+$", r"must \1", message)
    message = message.replace("an instance of Sequence", "a list or another Sequence")
    return message.removeprefix("Value error, ").replace("Input should ", "must ")
