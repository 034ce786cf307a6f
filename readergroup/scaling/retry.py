"""Retries for an event whose handler fails, and dead letters after the last attempt."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

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


#: The longest delay of a retry: ten years.
_MAX_DELAY_SECONDS: Final = 3650 * 86_400.0


class DelayedRetry(RetryPolicy):
    """Retries an event later, while the events behind it are handled, and makes it a dead letter after the last delay.

    An event that fails is stored, and counts as processed. When its delay has passed, the group reads it again from
    ``retry_stream``, in any process of the group. Each delivery makes ``attempts`` attempts without a long pause.

    **The order per key is given up** for events that fail: later events of the key are handled before the retry.

    Durations are seconds.

    Args:
        delays: The delay before each retry, such as ``[10, 60, 600]``.
        retry_stream: A stream that the group reads as well, and that nothing else writes to.
        dead_letters: The stream for events that failed after the last delay.
        attempts: The attempts of each delivery; 1 by default.
    """

    delays: Annotated[
        Sequence[Annotated[float, Field(strict=True, ge=0.001, le=_MAX_DELAY_SECONDS, allow_inf_nan=False)]],
        Field(min_length=1, max_length=100),
        AfterValidator(tuple),
    ]
    retry_stream: str
    attempts: Annotated[int, Field(strict=True, ge=1)] = 1

    @field_validator("retry_stream")
    @classmethod
    def _check_retry_stream(cls, stream: str) -> str:
        return check_stream_name(stream)

    @model_validator(mode="after")
    def _check_streams(self) -> Self:
        if self.dead_letters is None:
            raise ValueError("dead_letters is missing: name the stream for events that failed after the last delay")
        if self.dead_letters == self.retry_stream:
            raise ValueError("dead_letters and retry_stream must be two streams")
        return self


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
    #: With a `DelayedRetry`: the error of each earlier delivery, the oldest first.
    earlier_errors: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _without_defaults(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what older releases do not know, if it says nothing."""
        found: dict[str, Any] = fields(self)
        if not self.earlier_errors:
            del found["earlier_errors"]
        return found
