"""The store fulfils the contract: the suite of the SDK runs with one fixture that provides a store.

Run it with ``VALKEY_URL=valkey://127.0.0.1:6379/0 pytest``. Each test uses its own prefix.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
from valkey_store import ValkeyStore

from synchronizer.testing import SegmentStoreConformance


class TestValkeyStore(SegmentStoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[ValkeyStore]:
        with ValkeyStore(f"{os.environ['VALKEY_URL']}?prefix={uuid.uuid4()}") as store:
            yield store
