"""The store that readers are scaled on: one that processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import readergroup as rg


@pytest.fixture
def url(shared_store_url: str) -> str:
    return shared_store_url


@pytest.fixture
def client(url: str) -> Iterator[rg.Client]:
    with rg.connect(url) as client:
        yield client
