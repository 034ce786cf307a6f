"""The functions that a pool calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..streams.event import Event, EventBatch

T = TypeVar("T")

HandleEvent = Callable[[Event[T]], object]
HandleBatch = Callable[[EventBatch[T]], object]
