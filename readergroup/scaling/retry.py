"""What is done with an event whose handler fails: it is tried again, and set aside in the end."""

from __future__ import annotations

import base64
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator

from synchronizer import growing_pause

from ..event import EventPointer
from ..streams.config import check_stream_name


class RetryPolicy(BaseModel):
    """How often a handler is called for an event before that is set aside, and where. Durations are seconds.

    The delay doubles from attempt to attempt. Without ``dead_letters``, the name of a stream, nothing is set aside.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    attempts: Annotated[int, Field(ge=1)] = 5
    first_delay_seconds: Annotated[float, Field(ge=0)] = 0.2
    max_delay_seconds: Annotated[float, Field(ge=0)] = 30.0
    dead_letters: str | None = None

    @field_validator("dead_letters")
    @classmethod
    def _check_dead_letters(cls, stream: str | None) -> str | None:
        return None if stream is None else check_stream_name(stream)

    def delay_after(self, attempt: int) -> float:
        """How long to wait after the attempt of this number failed; the first one is 1."""
        return growing_pause(attempt, first=self.first_delay_seconds, most=self.max_delay_seconds)


def _from_base64(value: object) -> object:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


class DeadLetter(BaseModel):
    """An event that was set aside after its handler had failed for the last time.

    It lies in the stream of dead letters as JSON, for `PydanticSerializer(DeadLetter)`, with the routing key and the
    headers of the event.
    """

    model_config = ConfigDict(frozen=True)

    #: The event's bytes as they were written; base64 in JSON.
    data: Annotated[bytes, BeforeValidator(_from_base64), PlainSerializer(_to_base64, when_used="json")]
    pointer: EventPointer
    #: The type and text of what the last attempt raised.
    error: str
    attempts: int
