"""The golden files in `tests/wire`: what the first release stores, one file for each stored format.

``UPDATE=1 pytest`` writes a file that does not exist. No test rewrites one: what it holds must stay readable.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests.places import WIRE

#: Large data in golden files is this text repeated, so that a text file can hold it in short.
PERIOD: Final = b"0123456789abcdef"


def golden(name: str, written_today: bytes) -> bytes:
    """Return the golden file of this name."""
    path = golden_path(name)
    if is_to_write(path):
        path.write_bytes(written_today)
    return path.read_bytes()


def golden_path(name: str) -> Path:
    return WIRE / name


def is_to_write(path: Path) -> bool:
    return bool(os.environ.get("UPDATE")) and not path.exists()
