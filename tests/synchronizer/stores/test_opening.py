from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from synchronizer import SegmentStore
from synchronizer.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from synchronizer.stores import open_store


def test_an_unnamed_memory_is_private() -> None:
    with open_store("memory://") as one, open_store("memory://") as other:
        one.create("s")
        assert list(other.list()) == []


def test_a_named_memory_is_shared_and_outlives_its_stores() -> None:
    with open_store("memory://shop") as one, open_store("memory://shop") as other:
        one.create("s")
        one.close()
        assert list(other.list()) == ["s"]
        assert other.create("t")
    with open_store("memory://shop") as again, open_store("memory://another") as another:
        assert list(again.list()) == ["s", "t"]
        assert list(another.list()) == []


def test_three_slashes_are_relative_and_four_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:///shop.db") as relative, open_store(f"sqlite:///{tmp_path}/shop.db") as absolute:
        relative.create("s")
        assert list(absolute.list()) == ["s"]
        assert relative.url == absolute.url
    assert (tmp_path / "shop.db").exists()


def test_a_file_that_must_exist_is_not_made(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    with pytest.raises(NotFoundError, match=f"correct it: path='{tmp_path}/shop.db'"):
        open_store(url, must_exist=True)
    assert list(tmp_path.iterdir()) == []
    open_store(url).close()
    with open_store(url, must_exist=True) as store:
        assert store.create("s")


def test_an_unknown_scheme_is_named_and_a_password_is_not() -> None:
    with pytest.raises(UnsupportedError, match="'oracle'") as raised:
        open_store("oracle://scott:tiger@host/db")
    assert "tiger" not in str(raised.value)
    assert "sqlite:///" in str(raised.value)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("shop.db", "write 'sqlite:///shop.db'"),
        ("sqlite:shop.db", "write 'sqlite:///shop.db'"),
        ("sqlite://shop.db", "three slashes"),
        ("sqlite://", "three slashes"),
        ("sqlite:///", "memory://"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite:///shop.db?mode=ro", "remove them"),
        ("memory://shop?x=1", "remove them"),
        ("postgresql+psycopg://ann@host/db", r"remove '\+psycopg': scheme="),
        ("sqlite+pysqlite:///shop.db", r"remove '\+pysqlite'"),
    ],
)
def test_an_address_that_cannot_be_right_is_refused_with_a_remedy(url: str, remedy: str) -> None:
    with pytest.raises(InvalidArgumentError, match=remedy):
        open_store(url)


def test_a_missing_driver_is_told_with_a_remedy_and_other_stores_open(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["_sqlite3"] = None  # as in a Python that was built without SQLite
from synchronizer import UnsupportedError, open_store
open_store("memory://").close()
try:
    open_store("sqlite:///shop.db")
except UnsupportedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "install a Python that includes it: driver='sqlite3'" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.stores
def test_threads_may_close_a_store_at_once(store_url: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        for _ in range(30):
            store, together = open_store(store_url), threading.Barrier(4)

            def close(store: SegmentStore = store, together: threading.Barrier = together) -> None:
                together.wait(20)
                store.close()

            for closing in [threads.submit(close) for _ in range(4)]:
                closing.result(20)
