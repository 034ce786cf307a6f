"""A configuration that processes share: a listener receives each change at once, and invalid values are refused."""

import sys
import threading
from pathlib import Path
from tempfile import mkdtemp

from pydantic import BaseModel, Field

import readergroup as rg


class Settings(BaseModel):
    greeting: str = "hello"
    workers: int = Field(2, ge=1, le=64)


def main(folder: Path) -> None:
    url = f"sqlite:///{folder / 'shop.db'}"
    with rg.connect(url) as server, rg.connect(url) as console:  # as in two processes
        settings = server.shared_config("shop/settings", Settings)
        resized = threading.Event()

        def resize(change: rg.ValueChange[Settings]) -> None:
            print(f"{change.before.workers} -> {change.after.workers} workers")
            resized.set()

        settings.register_listener(resize, field="workers")

        by_hand = console.shared_config("shop/settings", Settings)
        try:
            by_hand.put("workers", 0)
        except rg.InvalidArgumentError as error:
            print("refused:", error)
        if by_hand.replace("workers", 4, expected=2):
            by_hand.put("greeting", "good day")
        if not resized.wait(timeout=30):
            raise TimeoutError("the listener did not receive the change")

        settings.refresh()
        print(settings.value)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
