"""How often, and after which pauses, what has failed is tried again."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .clock import growing_pause
from .configuration import Configuration


class Retries(Configuration):
    """How often a handler is called for an event that it fails on. Durations are seconds.

    The delay doubles from attempt to attempt.
    """

    attempts: Annotated[int, Field(strict=True, ge=1)] = 5
    first_delay_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.2
    max_delay_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 30.0

    def delay_after(self, attempt: int) -> float:
        """How long to wait after the attempt of this number failed; the first one is 1."""
        return growing_pause(attempt, first=self.first_delay_seconds, most=self.max_delay_seconds)
