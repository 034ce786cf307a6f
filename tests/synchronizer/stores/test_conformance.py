"""Every backend passes the suite that third parties run on theirs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from synchronizer.store import SegmentStore
from synchronizer.stores import open_store
from synchronizer.stores.nats import client as nats_client
from synchronizer.stores.sqlite.notify import NotifyFile
from synchronizer.testing import FailingStore, SegmentStoreConformance
from tests.conftest import OWN_URLS
from tests.servers.fresh import fresh_store
from tests.servers.pgbouncer import PgBouncer
from tests.servers.unavailable import ServerUnavailable


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
    def store(self, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SegmentStore]:
        def no_watch_left(_: NotifyFile) -> None:
            raise OSError("no watch left")

        monkeypatch.setattr(NotifyFile, "watch", no_watch_left)
        with open_store(sqlite_url) as store:
            yield store


class TestPostgresStore(SegmentStoreConformance):
    @pytest.fixture
    def store(self, postgres_url: str) -> Iterator[SegmentStore]:
        with open_store(postgres_url) as store:
            yield store


class TestPostgresStoreBehindPgBouncer(SegmentStoreConformance):
    """In the transaction mode of a real PgBouncer, where each statement may meet another session."""

    @pytest.fixture
    def store(self, postgres_url: str) -> Iterator[SegmentStore]:
        try:
            pooler = PgBouncer(postgres_url)
        except ServerUnavailable as reason:
            pytest.skip(str(reason))
        with pooler, open_store(pooler.url) as store:
            yield store


class TestNatsStore(SegmentStoreConformance):
    @pytest.fixture
    def store(self, nats_url: str) -> Iterator[SegmentStore]:
        with open_store(nats_url) as store:
            yield store


@pytest.mark.broad
class TestNatsStoreByPublicMeans(SegmentStoreConformance):
    """As with a release of nats-py whose private parts are not those that the short way knows."""

    @pytest.fixture
    def store(self, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SegmentStore]:
        monkeypatch.setattr(nats_client, "CAN_BE_SHORT", False)
        with open_store(nats_url) as store:
            yield store


@pytest.mark.broad
class TestNatsClusterStore(SegmentStoreConformance):
    """Three servers that replicate."""

    @pytest.fixture
    def store(self, nats_cluster_url: str) -> Iterator[SegmentStore]:
        with open_store(nats_cluster_url) as store:
            yield store


class TestFailingStoreWithoutFaults(SegmentStoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[SegmentStore]:
        with FailingStore(open_store("memory://"), rng=random.Random(1)) as store:
            yield store


if OWN_URLS:

    class TestStoresOfOnesOwn(SegmentStoreConformance):
        """What ``READERGROUP_TEST_URLS`` names."""

        @pytest.fixture(params=OWN_URLS)
        def store(self, request: pytest.FixtureRequest) -> Iterator[SegmentStore]:
            with fresh_store(request.param) as url, open_store(url) as store:
                yield store
