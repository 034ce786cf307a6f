"""A disk that fails to keep what was written: nobody is told that it is stored, neither now nor by a retry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from synchronizer.errors import CorruptStoreError
from synchronizer.store import Appended, UnknownOutcome
from synchronizer.stores import open_store
from synchronizer.stores.sqlite.file_lock import Gate
from synchronizer.stores.sqlite.store import SqliteStore
from tests.places import ROOT
from tests.synchronizer.stores.sqlite.gates import give_slot, held, is_locked, is_posted, patient_processes
from tests.waiting import PATIENCE_SECONDS, until

SHIM = ROOT / "tests" / "servers" / "failing_flush.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a disk whose flushes fail takes Linux and a C compiler")
    library = tmp_path_factory.mktemp("library") / "failing_flush.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM], check=True)
    return library


@pytest.mark.parametrize("case", ["unread", "append", "checkpoint"])
def test_after_a_failed_flush_the_file_is_not_used_until_it_is_opened_anew(
    case: str, library: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(library), "FAILING_FLUSH": str(tmp_path / "fails")}
    command = [sys.executable, "-m", "tests.synchronizer.stores.sqlite.test_flush", case, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        assert store.append("s", b"by another process") == Appended(store.info("s").length - 18, store.info("s").length)


def test_if_another_process_fails_to_flush_what_it_was_handed_the_outcome_is_unknown(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fails = str(tmp_path / "store.db"), tmp_path / "fails"
    environment = {**os.environ, "LD_PRELOAD": str(library), "FAILING_FLUSH": str(fails)}
    command = [sys.executable, "-m", "tests.synchronizer.stores.sqlite.test_flush", "lead", str(tmp_path)]
    with (
        patient_processes(),
        SqliteStore(path, write_timeout=PATIENCE_SECONDS) as owner,
        ThreadPoolExecutor() as threads,
    ):
        owner.create("s")
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as leader:
            assert leader.stdin and leader.stdout and leader.stdout.readline() == b"ready\n"
            with closing(Gate(f"{path}.lock", path)) as gate:
                first, *_ = give_slot(owner, gate, lambda: threads.submit(owner.append, "s", b"it has a slot now;"))
                assert first == Appended(0, 18)
                with held(gate, PATIENCE_SECONDS):
                    monkeypatch.setattr(owner._gate, "try_to_acquire", lambda: False)
                    doubtful = threads.submit(owner.append, "s", b"doubtful;")
                    until(lambda: is_posted(owner))
                    fails.write_text("store.db-wal")
                    leader.stdin.write(b"go\n")
                    leader.stdin.flush()
                    until(lambda: is_locked(f"{path}.lock.next"))
            answer = doubtful.result(PATIENCE_SECONDS)
            assert isinstance(answer, UnknownOutcome) and "the commit of another process failed" in str(answer.cause)
            assert leader.wait(PATIENCE_SECONDS) == 0
        monkeypatch.undo()
        end = owner.info("s").length
        assert owner.append("s", b"goes on;") == Appended(end, end + 8)
        assert owner.read("s", 0, 100).count(b"doubtful;") <= 1


def lead(folder: Path) -> None:
    """In a process with flushes that fail: commit, with what another process has handed over."""
    with SqliteStore(f"{folder}/store.db") as store:
        print("ready", flush=True)
        sys.stdin.readline()
        assert isinstance(store.append("s", b"by the leader;"), UnknownOutcome)
        assert store._writer.execute("SELECT start_offset FROM segment WHERE name = ''").fetchone() == (0,)


def main(case: str, folder: Path) -> None:
    """In a process with flushes that fail while there is a file ``fails``: of files whose name ends as it says."""
    url = f"sqlite:///{folder}/store.db"
    fails = folder / "fails"
    first, second = open_store(url), open_store(url)
    first.create("s")
    assert first.append_unread("s", b"kept;") == Appended(0, 5)
    fails.write_text("store.db" if case == "checkpoint" else "store.db-wal")
    if case == "checkpoint":
        append_until_refused(first)
    else:
        append = first.append_unread if case == "unread" else first.append
        answer = append("s", b"doubtful;", expected_offset=5)
        assert isinstance(answer, UnknownOutcome), answer
    fails.unlink()
    for store in (first, second):
        for call in (
            lambda store=store: store.append("s", b"doubtful;", expected_offset=5),
            lambda store=store: store.append_unread("s", b"doubtful;", expected_offset=5),
            lambda store=store: store.read("s", 0, 10),
            lambda store=store: store.info("s"),
            lambda store=store: store.truncate("s", 1),
            lambda store=store: store.wait({"s": 0}, 0.1),
        ):
            try:
                raise AssertionError(call())
            except CorruptStoreError as error:
                assert "open the file again" in str(error)
    first.close()
    try:
        raise AssertionError(open_store(url))
    except CorruptStoreError:
        pass  # the other one is still open
    second.close()
    with open_store(url) as store:
        assert store.read("s", 0, 5) == b"kept;"
        end = store.info("s").length
        assert store.append_unread("s", b"goes on;") == Appended(end, end + 8)


def append_until_refused(store: object) -> None:
    """The checkpoint comes after a commit that is stored; the next call is refused."""
    for _ in range(1_000):
        try:
            assert isinstance(store.append("s", bytes(1 << 20)), Appended)
        except CorruptStoreError:
            return
    raise AssertionError("no checkpoint failed")


if __name__ == "__main__":
    if sys.argv[1] == "lead":
        lead(Path(sys.argv[2]))
    else:
        main(sys.argv[1], Path(sys.argv[2]))
