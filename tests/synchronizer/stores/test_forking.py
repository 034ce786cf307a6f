"""What a fork waits for, and what a forked child does not keep."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from synchronizer.stores.forking import close_own, forks_wait, open_own
from synchronizer.stores.sqlite.file_lock import FairFileLock, Gate
from synchronizer.threads import forks
from tests.synchronizer.stores.sqlite.gates import held
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

LONG = PATIENCE_SECONDS
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def in_a_child(check: Callable[[], object]) -> object:
    """What ``check`` returns in a forked child."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(there, repr(check()).encode())
        except BaseException as error:
            os.write(there, repr(repr(error)).encode())
        finally:
            os._exit(0)
    os.close(there)
    with open(here) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return eval(said)


@pytest.fixture(autouse=True)
def forks_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_PATIENCE_SECONDS", LONG)


class Inside:
    """A thread inside of ``with forks_wait:``, until it is told to leave."""

    def __init__(self) -> None:
        self._entered, self.may_leave = threading.Event(), threading.Event()
        self.left_at = 0.0
        self._call = CallInThread(self._run)
        assert self._entered.wait(LONG)

    def _run(self) -> bool:
        with forks_wait:
            self._entered.set()
            was_told = self.may_leave.wait(LONG)
            self.left_at = time.monotonic()
        return was_told

    def ended(self) -> None:
        self.may_leave.set()
        assert self._call.ended() is True


def test_a_fork_waits_until_other_threads_are_out() -> None:
    thread = Inside()
    timer = threading.Timer(0.1, thread.may_leave.set)
    timer.start()
    child_began_at = in_a_child(time.monotonic)
    thread.ended()
    assert isinstance(child_began_at, float) and child_began_at >= thread.left_at > 0


def test_a_thread_does_not_enter_while_another_one_forks() -> None:
    thread, has_entered = Inside(), threading.Event()
    fork = CallInThread(lambda: in_a_child(lambda: forks_wait.was_cut))
    until(lambda: forks_wait._forking)

    def enter() -> bool:
        with forks_wait:
            has_entered.set()
        return True

    entering = CallInThread(enter)
    assert not has_entered.wait(0.05)
    thread.ended()
    assert fork.ended() is False
    assert entering.ended() is True


def test_the_forking_thread_itself_may_be_inside() -> None:
    with forks_wait:
        assert in_a_child(lambda: forks_wait.was_cut) is False


def test_a_fork_does_not_wait_for_ever_and_the_child_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_PATIENCE_SECONDS", 0.05)
    thread = Inside()
    assert in_a_child(lambda: forks_wait.was_cut) is True
    thread.ended()
    assert in_a_child(lambda: forks_wait.was_cut) is False
    assert in_a_child(lambda: in_a_child(lambda: forks_wait.was_cut)) is False


def test_what_an_ended_thread_left_behind_holds_up_no_fork() -> None:
    CallInThread(forks_wait.__enter__)._thread.join(LONG)  # as if an interrupt had kept it from leaving
    assert in_a_child(lambda: forks_wait.was_cut) is False


def test_a_signal_handler_may_fork_and_enter_at_any_point() -> None:
    children: list[int] = []

    def fork(*_: object) -> None:
        with forks_wait:
            child = os.fork()
            if not child:
                with forks_wait:
                    os._exit(0)
            children.append(child)

    before = signal.signal(signal.SIGVTALRM, fork)
    threads = [CallInThread(enter_again_and_again) for _ in range(2)]
    try:
        for number in range(30):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005 + 0.0001 * number)
            while len(children) <= number:
                with forks_wait:
                    pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        for thread in threads:
            assert thread.ended() is True
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)


def enter_again_and_again() -> bool:
    for _ in range(20_000):
        with forks_wait:
            pass
    return True


def test_a_child_does_not_share_the_files_of_its_parent(tmp_path: Path) -> None:
    file = open_own(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    closed = open_own(str(tmp_path / "file"), os.O_RDWR)
    number = closed.fileno()
    close_own(closed)
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert other == number

    def look() -> tuple[str, str]:
        files = os.readlink(f"/proc/self/fd/{file.fileno()}"), os.readlink(f"/proc/self/fd/{other}")
        close_own(file)
        return files

    if os.path.exists("/proc/self/fd"):
        assert in_a_child(look) == (os.devnull, str(tmp_path / "other"))
    file.write(b"kept")
    close_own(file)
    os.close(other)
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_nor_if_it_has_no_descriptor_left(tmp_path: Path) -> None:
    file = open_own(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno() + 1, limits[1]))
        child = os.fork()
        if not child:
            fcntl.flock(file, fcntl.LOCK_UN)  # would be the parent's lock
            os._exit(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert os.waitpid(child, 0)[1] == 0
    with open(tmp_path / "file") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    close_own(file)


class Child:
    """A forked child that lives until the end of the block."""

    def __enter__(self) -> Child:
        here, self._there = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._there)
            os.read(here, 1)
            os._exit(0)
        os.close(here)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._there)
        assert os.waitpid(self._pid, 0)[1] == 0


@pytest.mark.skipif(not FairFileLock.is_available(), reason="no locks of open files here")
def test_a_child_keeps_no_fair_lock_that_another_thread_holds(tmp_path: Path) -> None:
    lock = FairFileLock(str(tmp_path / "fair"))
    holding, may_leave = threading.Event(), threading.Event()

    def hold() -> bool:
        with lock.acquire("s", LONG) as is_held:
            holding.set()
            return is_held and may_leave.wait(LONG)

    thread = CallInThread(hold)
    assert holding.wait(LONG)
    with Child():
        with lock.acquire("s", 0) as is_held:
            assert not is_held
        may_leave.set()
        assert thread.ended() is True
        with lock.acquire("s", LONG) as is_held:  # as soon as the child has begun
            assert is_held


def test_a_child_that_leaves_the_gate_does_not_open_it_for_others(tmp_path: Path) -> None:
    """The locks are those of an open file, which parent and child would share."""
    gate = Gate(str(tmp_path / "lock"))
    with held(gate, LONG):
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            with open(tmp_path / "lock") as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not child:
        os._exit(0)
