"""The base class of options. Its constructor checks the fields, and raises errors of this distribution."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import InvalidArgumentError


class Configuration(BaseModel):
    """A frozen model whose constructor raises `InvalidArgumentError`, with pydantic's error as its cause.

    `model_validate`, which reads stored data, raises pydantic's own error: there the data is wrong, not an argument.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidArgumentError(f"{type(self).__name__} is invalid: {reasons(error)}") from error

    # Otherwise `model_validate` calls this constructor as well.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def differences(one: Configuration, other: Configuration) -> dict[str, object]:
    """Return the fields of ``one`` that differ in ``other``, for an error: of a configuration in both, these fields."""
    found = {}
    for field, value in one:
        there = getattr(other, field)
        if value != there:
            both = isinstance(value, Configuration) and isinstance(there, Configuration)
            found[field] = differences(value, there) if both else value
    return found


def reasons(error: ValidationError) -> str:
    """Return the findings of pydantic in one line: fields, reasons and values."""
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, e["loc"])), _in_our_words(e["type"], e["msg"]))))
        + (f", not {_shown(e['input']):.100}" if e["loc"] and e["type"] not in ("missing", "extra_forbidden") else "")
        for e in error.errors()
    )


def _shown(value: object) -> str:
    return str(value) if isinstance(value, timedelta) else repr(value)


def _in_our_words(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "there is no field of this name"
    if kind == "missing":
        return "is missing"
    return message.removeprefix("Value error, ").replace("Input should ", "must ")
