"""A change made by another process, on a store that processes share."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import Connection

import pytest

from notifications import NotificationKey
from synchronizer import ClosedError, open_store
from tests.clean_processes import CLEAN
from tests.notifications.counting import Add, Counted, CountNotifier, Heard, counter
from tests.waiting import PATIENCE_SECONDS, until

#: When the others take the one that listens for dead. It renews its role much more often: a busy machine may pause it.
ROLE_TIMEOUT_SECONDS = 6.0
RENEWING_TIMEOUT_SECONDS = 1.0


def change_when_asked(url: str, pipe: Connection) -> None:
    """Runs in a process of its own: makes the changes that it is asked for."""
    with open_store(url) as store:
        replica = counter(store)
        pipe.send("ready")
        while (amount := pipe.recv()) != 0:
            replica.update_state_unconditionally(Add(amount=amount))


@pytest.mark.stores
def test_a_change_by_another_process_is_told_long_before_the_interval(shared_store_url: str) -> None:
    url = shared_store_url
    here, there = CLEAN.Pipe()
    with open_store(url) as store, CountNotifier(counter(store), interval_seconds=60) as notifier:
        heard = Heard()
        notifier.register_listener(heard)
        process = CLEAN.Process(target=change_when_asked, args=(url, there))
        process.start()
        try:
            assert here.recv() == "ready"
            for value in range(1, 6):
                here.send(1)
                heard.wait_for(value)
            here.send(0)
        finally:
            process.join(PATIENCE_SECONDS)
            process.kill()
    assert heard.values == list(range(6))


def listen_in_a_fork(url: str, pipe: Connection) -> None:
    with open_store(url) as store, CountNotifier(counter(store), interval_seconds=0.05) as notifier:
        heard = Heard()
        notifier.register_listener(heard)
        pipe.send([heard.wait_for(0), sorted(t.name for t in threading.enumerate() if t.name == "APScheduler")])
    until(lambda: threading.active_count() == 1, "the threads have ended")
    pipe.send([t.name for t in threading.enumerate()])


@pytest.mark.stores
def test_a_forked_child_may_have_notifiers_of_its_own(shared_store_url: str) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with open_store("memory://") as store, CountNotifier(counter(store)) as notifier:
        notifier.register_listener(Heard())  # the scheduler runs in the parent
        process = context.Process(target=listen_in_a_fork, args=(shared_store_url, there))
        process.start()
        try:
            assert here.poll(PATIENCE_SECONDS)
            assert here.recv() == [[0], ["APScheduler"]]
            assert here.poll(PATIENCE_SECONDS)
            assert here.recv() == ["MainThread"]
        finally:
            process.join(PATIENCE_SECONDS)
            process.kill()


def refused_in_a_fork(notifier: CountNotifier, pipe: Connection) -> None:
    for call in (lambda: notifier.register_listener(Heard()), lambda: notifier.wait(timeout=0), notifier.poll):
        with pytest.raises(ClosedError, match="parent process"):
            call()
    pipe.send("all refused")


def test_a_forked_child_may_not_use_the_notifier_that_it_inherited() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with open_store("memory://") as store, CountNotifier(counter(store)) as notifier:
        notifier.register_listener(Heard())
        with notifier._order:  # as if another thread held it: nobody would give it back in the child
            process = context.Process(target=refused_in_a_fork, args=(notifier, there))
            process.start()
        try:
            assert here.poll(PATIENCE_SECONDS)
            assert here.recv() == "all refused"
        finally:
            process.kill()
            process.join(PATIENCE_SECONDS)


def test_notifications_are_picklable() -> None:
    heard: list[Counted] = []
    with open_store("memory://") as store, CountNotifier(counter(store)) as notifier:
        heard.append(notifier.wait(timeout=10))
    here, there = multiprocessing.get_context("spawn").Pipe()
    there.send(heard[0])
    assert here.recv() == heard[0]


# ---------------------------------------------------------------------- a durable name


def listen_durably(url: str, pipe: Connection, role_timeout_seconds: float, stay_at: int) -> None:
    """Runs in a process of its own: tells what it is told, and does not come back from the call with ``stay_at``."""
    stay = threading.Event()

    def hear(notification: Counted) -> None:
        pipe.send((notification.value, notification.key))
        if notification.value == stay_at:
            stay.wait()

    with open_store(url) as store, CountNotifier(counter(store), role_timeout_seconds=role_timeout_seconds) as notifier:
        notifier.register_listener(hear, durable="sizer")
        pipe.recv()


@pytest.mark.stores(round_robin=True)
def test_f19_what_a_killed_process_had_not_recorded_is_told_to_the_next_and_to_no_two_at_a_time(
    shared_store_url: str,
) -> None:
    pipes, processes = [], []
    try:
        with open_store(shared_store_url) as store:
            replica = counter(store)
            for timeout_seconds in RENEWING_TIMEOUT_SECONDS, ROLE_TIMEOUT_SECONDS:
                here, there = CLEAN.Pipe()
                arguments = shared_store_url, there, timeout_seconds, 2
                process = CLEAN.Process(target=listen_durably, args=arguments, daemon=True)
                process.start()
                pipes.append(here)
                processes.append(process)
                if len(pipes) == 1:
                    assert receive(here)[0] == 0
            replica.update_state_unconditionally(Add())
            replica.update_state_unconditionally(Add())
            assert receive(pipes[0])[0] == 1
            stayed_in = receive(pipes[0])
            assert stayed_in[0] == 2
            # A call that takes long keeps the turn.
            assert not pipes[1].poll(1.5 * ROLE_TIMEOUT_SECONDS)
            processes[0].kill()
            processes[0].join()
            replica.update_state_unconditionally(Add())
            assert receive(pipes[1]) == stayed_in
    finally:
        for process in processes:
            process.kill()
            process.join()


def receive(pipe: Connection) -> tuple[int, NotificationKey]:
    assert pipe.poll(PATIENCE_SECONDS), "nothing came in time"
    found: tuple[int, NotificationKey] = pipe.recv()
    return found
