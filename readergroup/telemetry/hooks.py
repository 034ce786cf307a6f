"""Where `instrument` takes hold of the handlers of pools. Nothing is imported here, and nothing runs until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

Handle = Callable[[Any], Any]


class Around(Protocol):
    def __call__(self, handle: Handle, group: str, reader: str) -> Handle:
        """Return what a worker calls in place of ``handle``: a plain function, or an ``async def`` if it is one."""
        ...


class Hooks:
    #: Asked once for each worker. None: handlers are called as they are.
    around: Around | None = None


hooks: Final = Hooks()
