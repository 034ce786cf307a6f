"""Every backend passes the suite that third parties run on theirs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from synchronizer.store import SegmentStore
from synchronizer.stores import open_store
from synchronizer.stores.notify import NotifyFile
from synchronizer.testing import FailingStore, SegmentStoreConformance


class TestMemoryStore(SegmentStoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[SegmentStore]:
        with open_store("memory://") as store:
            yield store


class TestSqliteStore(SegmentStoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[SegmentStore]:
        with open_store(f"sqlite:///{tmp_path}/store.db") as store:
            yield store


class TestSqliteStoreWithoutFileWatches(SegmentStoreConformance):
    """As on systems without inotify, or when its limit is reached: changes are found by polling."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SegmentStore]:
        def no_watch_left(_: NotifyFile) -> None:
            raise OSError("no watch left")

        monkeypatch.setattr(NotifyFile, "watch", no_watch_left)
        with open_store(f"sqlite:///{tmp_path}/store.db") as store:
            yield store


class TestFailingStoreWithoutFaults(SegmentStoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[SegmentStore]:
        with FailingStore(open_store("memory://"), rng=random.Random(1)) as store:
            yield store
