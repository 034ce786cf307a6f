"""Redirects what Java and the workers of Spark write on the standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def stderr_in(path: Path) -> Iterator[None]:
    """Append the standard error of processes that start in the block to this file."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
