"""How often, and after which delays, a handler is called again for an event."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from synchronizer.clock import growing_pause

from ...configuration import Configuration

_MAX_ERROR_LENGTH: Final = 100_000


class Retries(Configuration):
    """How often a handler is called for an event that it fails on. The delay doubles from attempt to attempt.

    Args:
        attempts: The number of calls, at least 1; 5 by default.
        first_delay_seconds: The delay after the first attempt, from 0 on; 0.2 by default.
        max_delay_seconds: The longest delay, from 0 on; 30 by default.
    """

    attempts: Annotated[int, Field(strict=True, ge=1)] = 5
    first_delay_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.2
    max_delay_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 30.0

    def delay_after(self, attempt: int) -> float:
        """Return how many seconds to wait after attempt number ``attempt`` failed; the first is number 1."""
        return growing_pause(attempt, first=self.first_delay_seconds, most=self.max_delay_seconds)


def text_of(error: BaseException, length: int = _MAX_ERROR_LENGTH) -> str:
    """Return a text of the error that can be stored, whatever it contains, and even if its ``__str__`` raises."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text[:length].encode(errors="backslashreplace").decode()[:length]
