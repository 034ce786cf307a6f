from __future__ import annotations

from collections.abc import Iterator

import pytest

from synchronizer import SegmentStore, open_store


@pytest.fixture
def store(store_url: str) -> Iterator[SegmentStore]:
    with open_store(store_url) as store:
        yield store
