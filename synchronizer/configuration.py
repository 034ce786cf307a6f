"""The base of what applications configure with: its fields are checked when it is made, with errors of ours."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import InvalidArgumentError


class Configuration(BaseModel):
    """A frozen model whose constructor raises `InvalidArgumentError`, with pydantic's error as its cause.

    What is read from a store by `model_validate` raises pydantic's own: there it is the data that is wrong.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidArgumentError(f"{type(self).__name__} cannot be made of this: {reasons(error)}") from error

    # Else `model_validate` calls it as well.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def reasons(error: ValidationError) -> str:
    """What pydantic found wrong, in one line: fields, why, and what was given."""
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, e["loc"])), str(e["msg"]).removeprefix("Value error, "))))
        + (f", not {e['input']!r:.100}" if e["loc"] and e["type"] not in ("missing", "extra_forbidden") else "")
        for e in error.errors()
    )
