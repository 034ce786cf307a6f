"""Processes that fork while they have a store open, or before, or after."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from synchronizer.errors import ClosedError, ReaderGroupError
from synchronizer.store import Appended
from synchronizer.stores import memory, open_store
from tests.places import ROOT
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
LONG = PATIENCE_SECONDS


@pytest.fixture
def url(tmp_path: Path) -> str:
    with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        store.create("s")
    return f"sqlite:///{tmp_path}/store.db"


def in_a_fork(call: Callable[[], object]) -> object:
    """What ``call`` returns or raises in a forked child."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_answer, args=(call, there))
    child.start()
    there.close()
    assert here.poll(LONG)
    answer = here.recv()
    child.join(LONG)
    assert child.exitcode == 0
    return answer


def _answer(call: Callable[[], object], there: Any) -> None:
    try:
        there.send(call())
    except ReaderGroupError as error:
        there.send(error)


def append(url: str, data: bytes = b"data") -> object:
    with open_store(url) as store:
        return store.append("s", data)


def test_a_child_is_refused_the_file_that_its_parent_has_open(url: str, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "store.db")
    with open_store(url) as store:
        for name in (url, f"sqlite:///{tmp_path}/link.db"):
            answer = in_a_fork(lambda name=name: append(name))
            assert isinstance(answer, ClosedError)
            assert "start it with 'spawn' or 'forkserver', or close the file before the fork" in str(answer)
        assert store.append("s", b"data") == Appended(0, 4)
    with open_store(url) as store:
        assert store.read("s", 0, 100) == b"data"


def test_so_is_a_grandchild(url: str) -> None:
    with open_store(url):
        assert isinstance(in_a_fork(lambda: in_a_fork(lambda: append(url))), ClosedError)


def test_a_child_that_was_forked_while_one_of_two_stores_was_open_is_refused_the_file(url: str) -> None:
    with open_store(url):
        open_store(url).close()
        assert isinstance(in_a_fork(lambda: append(url)), ClosedError)


def test_a_child_may_open_what_its_parent_has_closed(url: str) -> None:
    open_store(url).close()
    assert in_a_fork(lambda: append(url)) == Appended(0, 4)
    assert in_a_fork(lambda: in_a_fork(lambda: append(url))) == Appended(4, 8)
    assert append(url) == Appended(8, 12)


def test_a_child_may_open_what_its_parent_opens_after_the_fork(url: str) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_open_when_told, args=(url, there))
    child.start()
    with open_store(url) as store:
        here.send("go")
        assert here.poll(LONG) and here.recv() == Appended(0, 4)
        assert store.append("s", b"more", expected_offset=4) == Appended(4, 8)
    child.join(LONG)


def _open_when_told(url: str, there: Any) -> None:
    there.recv()
    there.send(append(url))


def test_a_child_may_open_another_file(url: str, tmp_path: Path) -> None:
    def make_and_append() -> object:
        other = f"sqlite:///{tmp_path}/other.db"
        with open_store(other) as store:
            store.create("s")
        return append(other)

    with open_store(url):
        assert in_a_fork(make_and_append) == Appended(0, 4)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_share_no_memory_may_open_the_same_file(url: str, method: str) -> None:
    with open_store(url) as store, multiprocessing.get_context(method).Pool(2) as pool:
        assert sorted(pool.map(append, [url] * 4), key=lambda each: each.offset) == [
            Appended(offset, offset + 4) for offset in range(0, 16, 4)
        ]
        assert store.read("s", 0, 100) == b"data" * 4


@pytest.mark.stores("sqlite", "postgresql", "nats")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [10, pytest.param(30, marks=pytest.mark.broad)])
def test_a_process_may_fork_at_any_moment(shared_store_url: str, tmp_path: Path, times: int) -> None:
    childs_url = f"sqlite:///{tmp_path}/child.db" if shared_store_url.startswith("sqlite:") else shared_store_url
    command = [sys.executable, "-m", "tests.synchronizer.stores.forking_under_load", shared_store_url, childs_url]
    ran = subprocess.run([*command, "1", str(times)], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    children, acknowledged = map(int, ran.stdout.split())
    assert children == times and acknowledged > 0


def test_a_child_begins_with_empty_memory_even_if_another_thread_was_in_it() -> None:
    with open_store("memory://forked") as store, memory._named_lock:
        store.create("s")
        with store._memory.lock:
            assert in_a_fork(lambda: list(open_store("memory://forked").list())) == []
        assert list(store.list()) == ["s"]


_OUTLIVE = """
import os, sys
from synchronizer import open_store
store = open_store(sys.argv[1])
store.append("s", b"old")
if os.fork():
    os.kill(os.getpid(), 9)
print(os.getpid(), flush=True)
sys.stdin.readline()
"""


def test_a_child_that_outlives_its_parent_harms_nothing_when_it_ends(url: str) -> None:
    """Its connections are those of the parent: closed by the end of the interpreter, they would move an old log."""
    command = [sys.executable, "-c", _OUTLIVE, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline()
        with open_store(url) as store:
            assert store.append("s", b"new", expected_offset=3) == Appended(3, 6)
        with open_store(url) as store:
            assert store.append("s", b"er", expected_offset=6) == Appended(6, 8)
            process.communicate("end\n", LONG)
            assert store.append("s", b"!", expected_offset=8) == Appended(8, 9)
    with open_store(url) as store:
        assert store.read("s", 0, 10) == b"oldnewer!"
