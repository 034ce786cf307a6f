"""Opens clients while servers and connections fail."""

from __future__ import annotations

import time

import readergroup as rg


def connected(url: str, *, seconds: float) -> rg.Client:
    """The client, as soon as the store answers, within this time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return rg.connect(url)
        except rg.StoreUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
