"""The store that readers are scaled on: a file, because processes share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import readergroup as rg


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture
def client(url: str) -> Iterator[rg.Client]:
    with rg.connect(url) as client:
        yield client
