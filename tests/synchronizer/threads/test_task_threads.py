"""Tasks share threads: each is called when it is due, by one of few threads, and none waits for another."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from synchronizer import ManualClock, StoreUnavailableError, SystemClock
from synchronizer.threads.task_threads import MAX_HELPERS, MAX_THREADS, Task, TaskThreads
from tests.interrupts import interrupts
from tests.waiting import PATIENCE_SECONDS, STARTS_A_THREAD, until


def running() -> int:
    return sum(thread.name == "tasks" for thread in threading.enumerate())


@pytest.fixture
def threads() -> Iterator[TaskThreads]:
    yield TaskThreads("tasks", SystemClock())
    until(lambda: running() == 0, "no thread is left")


class Steps:
    """Tasks that note their calls."""

    def __init__(self, threads: TaskThreads) -> None:
        self.threads = threads
        self.called: list[str] = []
        self.tasks: list[Task] = []

    def begin(self, name: str, step: Callable[[], float | None] = lambda: None) -> Task:
        def noted() -> float | None:
            self.called.append(name)
            return step()

        task = Task(self.threads, noted)
        task.begin()
        self.tasks.append(task)
        return task

    def end(self) -> None:
        for task in self.tasks:
            task.end(PATIENCE_SECONDS)


@pytest.fixture
def steps(threads: TaskThreads) -> Iterator[Steps]:
    steps = Steps(threads)
    yield steps
    steps.end()


def test_what_is_due_first_is_called_first(steps: Steps) -> None:
    let_go = threading.Event()
    now = SystemClock().monotonic()
    begun = threading.Event()

    def hold() -> None:
        begun.set()
        let_go.wait(PATIENCE_SECONDS)

    holding = [steps.begin("holds", hold) for _ in range(MAX_THREADS)]
    for task in holding:
        task.schedule(now)
    until(lambda: len(steps.called) == MAX_THREADS)
    later, sooner = steps.begin("later"), steps.begin("sooner")
    later.schedule(now + 0.0002)
    sooner.schedule(now + 0.0003)
    sooner.schedule(now + 0.0001)  # earlier than it was
    later.schedule(now + 100)  # the earlier time stays
    let_go.set()
    until(lambda: len(steps.called) == MAX_THREADS + 2)
    assert {*steps.called[MAX_THREADS:]} == {"sooner", "later"}


def test_a_task_comes_at_its_time_on_the_clock() -> None:
    clock = ManualClock()
    steps = Steps(TaskThreads("tasks", clock))
    one, other = steps.begin("one"), steps.begin("other")
    one.schedule(clock.monotonic() + 10)
    other.schedule(clock.monotonic() + 5)
    clock.advance(5)
    until(lambda: steps.called == ["other"])
    clock.advance(5)
    until(lambda: steps.called == ["other", "one"])
    steps.end()


def test_as_many_calls_hang_as_there_are_threads_and_the_rest_follows(steps: Steps) -> None:
    let_go = threading.Event()
    tasks = [steps.begin("hangs", lambda: let_go.wait(PATIENCE_SECONDS) and None) for _ in range(MAX_THREADS + 10)]
    for task in tasks:
        task.schedule(0)
    until(lambda: len(steps.called) == MAX_THREADS)
    assert running() == MAX_THREADS
    let_go.set()
    until(lambda: len(steps.called) == len(tasks))


def test_a_hanging_call_leaves_a_thread_to_the_other_task(steps: Steps) -> None:
    let_go = threading.Event()
    hanging, other = steps.begin("hangs", lambda: let_go.wait(PATIENCE_SECONDS) and None), steps.begin("other")
    hanging.schedule(0)
    until(lambda: steps.called == ["hangs"])
    other.schedule(0)
    until(lambda: steps.called == ["hangs", "other"])
    let_go.set()


def test_helpers_take_half_of_the_threads_and_those_not_needed_end(steps: Steps) -> None:
    let_go, calls = threading.Event(), []

    def call() -> None:
        calls.append(threading.get_ident())
        let_go.wait(PATIENCE_SECONDS)

    def step() -> None:
        task.help(call, MAX_THREADS)

    task = steps.begin("asks", step)
    task.schedule(0)
    until(lambda: len(calls) == MAX_HELPERS)
    other = steps.begin("other")
    other.schedule(0)
    until(lambda: "other" in steps.called)
    let_go.set()
    until(lambda: running() == 1, "one thread waits for both tasks")
    assert len({*calls}) == MAX_HELPERS


@pytest.mark.unexpected_errors
def test_a_step_that_raises_is_called_again(steps: Steps) -> None:
    failures = [ValueError("unexpected")] * 2

    def step() -> None:
        if failures:
            raise failures.pop()

    steps.begin("raises", step).schedule(0)
    until(lambda: steps.called == ["raises"] * 3)


def test_the_first_task_needs_a_thread_and_the_others_do_with_what_there_is(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading, STARTS_A_THREAD, start)
        task = Task(steps.threads, lambda: None)
        with pytest.raises(StoreUnavailableError):
            task.begin()
        task.end(0)
    steps.begin("one").schedule(0)
    until(lambda: steps.called == ["one"])
    monkeypatch.setattr(threading, STARTS_A_THREAD, start)
    for _ in range(3):
        steps.begin("another").schedule(0)
    until(lambda: len(steps.called) == 4)


def test_an_interrupted_call_of_a_task_holds_up_no_other(threads: TaskThreads) -> None:
    steps = Steps(threads)
    steps.begin("lasts")
    interrupted: list[Task] = []

    def use() -> None:
        task = Task(threads, lambda: None)
        interrupted.append(task)
        task.begin()
        task.schedule(0)
        task.end(1.0)

    for run in interrupts(use):
        assert isinstance(run.error, KeyboardInterrupt), run.place
        for task in interrupted:
            task.end(1.0)
        interrupted.clear()
        steps.tasks[0].schedule(0)
        steps.called.clear()
        until(lambda: steps.called, run.place)
        assert not threads._starting, run.place
    steps.end()
    # Python lists a thread for ever that an interrupt within its `Thread.start` kept from beginning: it is not alive.
    until(lambda: not any(each.is_alive() and each.name == "tasks" for each in threading.enumerate()))


def test_a_forked_child_starts_threads_of_its_own(steps: Steps) -> None:
    steps.begin("of the parent").schedule(0)
    until(lambda: steps.called == ["of the parent"])
    until(lambda: steps.threads._idle, "the parent's thread waits")
    child = os.fork()
    if child == 0:
        called = threading.Event()
        task = Task(steps.threads, called.set)
        task.begin()
        task.schedule(0)
        os._exit(0 if called.wait(20) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
