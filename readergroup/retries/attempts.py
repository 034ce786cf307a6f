"""What an event that is retried carries in its headers: where it comes from, and which attempts have failed."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from ..streams.config import stream_of
from ..streams.data.block import Headers
from ..streams.event import Event, EventPointer

#: The header of a retried event: the pointer of the event that failed first.
RETRY_OF: Final = "readergroup-retry-of"
#: The header with the `_Failed` of earlier deliveries.
_FAILED: Final = "readergroup-retry"
#: What is kept of each error. The dead letter keeps more of the last one.
_MAX_ERROR_LENGTH: Final = 500


class _Failed(BaseModel):
    model_config = ConfigDict(frozen=True)

    attempts: int
    #: One for each delivery that failed.
    errors: tuple[str, ...]


class FailedAttempts(NamedTuple):
    """An event without what retries have added, and its failed attempts."""

    pointer: EventPointer
    headers: Headers
    attempts: int = 0
    #: The error of each delivery that failed, the oldest first.
    errors: tuple[str, ...] = ()

    @classmethod
    def of(cls, event: Event[Any], retry_stream: str) -> Self:
        """Return those before this delivery. Only events of the stream of retries have any."""
        if stream_of(event.segment) != retry_stream or not {RETRY_OF, _FAILED} <= event.headers.keys():
            return cls(event.pointer, event.headers)
        headers = {name: value for name, value in event.headers.items() if name not in (RETRY_OF, _FAILED)}
        try:
            failed = _Failed.model_validate_json(event.headers[_FAILED])
            pointer = EventPointer.parse(event.headers[RETRY_OF].decode())
        except (ValidationError, ValueError):  # written by another program
            return cls(event.pointer, event.headers)
        return cls(pointer, headers, failed.attempts, failed.errors)

    def with_failure(self, error: str, attempts: int) -> Self:
        """Return them with one more delivery that failed."""
        return self._replace(attempts=self.attempts + attempts, errors=(*self.errors, error[:_MAX_ERROR_LENGTH]))

    @property
    def all_headers(self) -> Headers:
        """The headers of the event when it is retried."""
        failed = _Failed(attempts=self.attempts, errors=self.errors)
        return {**self.headers, RETRY_OF: str(self.pointer).encode(), _FAILED: failed.model_dump_json().encode()}
