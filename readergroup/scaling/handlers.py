"""The functions that a pool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..streams.event import Event, EventBatch

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")

HandleEvent = Callable[[Event[T]], object]
HandleBatch = Callable[[EventBatch[T]], object]
HandleArrow = Callable[["pyarrow.RecordBatch"], object]


@dataclass(frozen=True)
class ArrowHandler:
    """Handles a batch by calling a function with its events as Arrow."""

    handle_arrow: HandleArrow

    def __call__(self, batch: EventBatch[Any], /) -> object:
        return self.handle_arrow(batch.to_arrow())
