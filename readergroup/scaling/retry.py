"""Retries for an event whose handler fails, and dead letters after the last attempt."""

from __future__ import annotations

import base64
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, field_validator

from synchronizer import Retries

from ..streams.config import check_stream_name
from ..streams.event import EventPointer


class RetryPolicy(Retries):
    """How often a handler is called for one event, and which stream gets the event after the last attempt.

    Durations are seconds.

    Args:
        dead_letters: The stream for events that failed for the last time. Default: none; such an event stops the pool.
    """

    dead_letters: str | None = None

    @field_validator("dead_letters")
    @classmethod
    def _check_dead_letters(cls, stream: str | None) -> str | None:
        return None if stream is None else check_stream_name(stream)


def _from_base64(value: object) -> object:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


class DeadLetter(BaseModel):
    """An event that was set aside after its handler failed for the last time.

    The stream of dead letters holds it as JSON, with the routing key and the headers of the event. Read it with
    `PydanticSerializer(DeadLetter)`.
    """

    # JSON, because people read dead letters with general tools such as `readergroup read`, often after the program that
    # wrote the event has changed. Base64 adds a third, so an event above about 6 MiB does not fit: the pool then stops
    # with `HandlerError` and does not lose the event.
    model_config = ConfigDict(frozen=True)

    #: The bytes of the event as they were written; base64 in JSON.
    data: Annotated[bytes, BeforeValidator(_from_base64), PlainSerializer(_to_base64, when_used="json")]
    pointer: EventPointer
    #: The type and text of the exception that the last attempt raised.
    error: str
    attempts: int
