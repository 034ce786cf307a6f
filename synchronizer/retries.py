"""How often, and after which pauses, what has failed is tried again."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from .clock import growing_pause


class Retries(BaseModel):
    """How often a handler is called for an event that it fails on. Durations are seconds.

    The delay doubles from attempt to attempt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    attempts: Annotated[int, Field(ge=1)] = 5
    first_delay_seconds: Annotated[float, Field(ge=0)] = 0.2
    max_delay_seconds: Annotated[float, Field(ge=0)] = 30.0

    def delay_after(self, attempt: int) -> float:
        """How long to wait after the attempt of this number failed; the first one is 1."""
        return growing_pause(attempt, first=self.first_delay_seconds, most=self.max_delay_seconds)
