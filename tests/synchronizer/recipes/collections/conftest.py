from __future__ import annotations

from collections.abc import Iterator

import pytest

from synchronizer import open_store
from synchronizer.testing import FailingStore


@pytest.fixture
def store(store_url: str) -> Iterator[FailingStore]:
    with FailingStore(open_store(store_url)) as store:
        yield store
