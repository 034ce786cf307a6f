"""An object that its owner closes."""

from typing import Protocol


class Closable(Protocol):
    def close(self) -> None: ...
