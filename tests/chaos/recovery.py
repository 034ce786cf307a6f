"""What a writer and a listener go through when something befalls the store, and how soon all is well again.

``python -m tests.chaos.recovery --store nats-cluster --rounds 5`` tries each fault several times.
"""

from __future__ import annotations

import argparse
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from synchronizer import (
    Appended,
    Conflict,
    SegmentStore,
    StoreUnavailableError,
    UnknownOutcome,
    open_store,
)
from tests.chaos.evidence import TAKEN_OVER
from tests.chaos.hosts import NETWORK_FAULTS, Fault, Host, host
from tests.waiting import PATIENCE_SECONDS

SEGMENT: Final = "numbers"
#: So that something has been stored before the fault comes.
_BEFORE: Final = 20
_PAUSE_SECONDS: Final = 0.005
_WAIT_SECONDS: Final = 1.0
_LONG: Final = PATIENCE_SECONDS


class Trial(NamedTuple):
    """One fault, and what it did. Seconds."""

    fault: Fault
    #: From its end on, or from its beginning where others take over from a node: to the next acknowledged append.
    answered: float
    #: The same: until a listener in another connection was woken and had it.
    heard: float
    #: The longest time without an acknowledged append, the fault included.
    longest_pause: float
    #: How many appends were acknowledged, and how many answers were lost.
    appends: int
    lost_answers: int


def try_out(host: Host, url: str, fault: Fault, seconds: float) -> Trial:
    """Let the fault befall an empty store for so long. What is stored then is what was acknowledged, each once."""
    way = host.through_proxy(url) if fault in NETWORK_FAULTS else url
    with open_store(way) as store, open_store(way) as other:
        store.create(SEGMENT)
        writer, listener = Writer(store), Listener(other)
        with _running(writer.write, listener.listen) as failures:
            _await(lambda: len(listener.heard) > _BEFORE, failures)
            begun = time.monotonic()
            with host.suffer(fault):
                threading.Event().wait(seconds)
            healed = time.monotonic()
            since = begun if fault in TAKEN_OVER else healed
            _await(lambda: any(at > healed for _, at in writer.acknowledged), failures)
            next_one, answered_at = next(each for each in writer.acknowledged if each[1] > healed)
            _await(lambda: len(listener.heard) > next_one, failures)
            writer.stop.set()
            _await(lambda: writer.has_stopped.is_set() and len(listener.heard) == writer.next, failures)
            listener.stop.set()
    with open_store(url) as store:
        length = store.info(SEGMENT).length
        numbers = _numbers(store.read(SEGMENT, 0, length + 1))
    assert numbers == list(range(writer.next)), f"{fault}: stored are {numbers}, and {writer.next} were acknowledged"
    assert [number for number, _ in listener.heard] == numbers, f"{fault}: the listener heard otherwise"
    times = [at for _, at in writer.acknowledged]
    pauses = [after - before for before, after in zip(times, times[1:], strict=False) if after > begun]
    if fault in TAKEN_OVER:
        answered_at = begun + max(pauses)
    return Trial(
        fault,
        answered=answered_at - since,
        heard=listener.heard[next_one][1] - since if fault not in TAKEN_OVER else answered_at - since,
        longest_pause=max(pauses),
        appends=writer.next,
        lost_answers=writer.lost_answers,
    )


class Writer:
    """Appends one number after the other, each where it knows the end to be, until it is told to stop."""

    def __init__(self, store: SegmentStore) -> None:
        self.stop = threading.Event()
        self.has_stopped = threading.Event()
        self.next = 0
        self.acknowledged: list[tuple[int, float]] = []
        self.lost_answers = 0
        self._store = store
        self._end = 0

    def write(self) -> None:
        while not self.stop.is_set():
            self._append(b"%d;" % self.next)
            self.acknowledged.append((self.next, time.monotonic()))
            self.next += 1
            self.stop.wait(_PAUSE_SECONDS)
        self.has_stopped.set()

    def _append(self, data: bytes) -> None:
        in_doubt = False
        while True:
            try:
                answer = self._store.append(SEGMENT, data, expected_offset=self._end)
            except StoreUnavailableError:
                self.stop.wait(_PAUSE_SECONDS)
                if self.stop.is_set():
                    self.stop.wait(_PAUSE_SECONDS)
                continue
            if isinstance(answer, Appended):
                assert (answer.offset, answer.length) == (self._end, self._end + len(data))
                break
            if isinstance(answer, Conflict):
                assert in_doubt and answer.delta == data, f"somebody else wrote: {answer}"
                break
            assert isinstance(answer, UnknownOutcome)
            in_doubt = True
            self.lost_answers += 1
        self._end += len(data)


class Listener:
    """Waits for numbers and notes when it has each, until it is told to stop."""

    def __init__(self, store: SegmentStore) -> None:
        self.stop = threading.Event()
        self.heard: list[tuple[int, float]] = []
        self._store = store
        self._end = 0
        self._rest = b""

    def listen(self) -> None:
        while not self.stop.is_set():
            try:
                if not self._store.wait({SEGMENT: self._end}, _WAIT_SECONDS):
                    continue
                data = self._store.read(SEGMENT, self._end, 1 << 20)
            except StoreUnavailableError:
                self.stop.wait(_PAUSE_SECONDS)
                continue
            now = time.monotonic()
            self._end += len(data)
            whole, _, self._rest = (self._rest + data).rpartition(b";")
            self.heard += [(number, now) for number in _numbers(whole)]


def _numbers(data: bytes) -> list[int]:
    return [int(number) for number in data.split(b";") if number]


@contextmanager
def _running(*targets: Callable[[], None]) -> Iterator[list[str]]:
    failures: list[str] = []

    def run(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    yield failures
    for thread in threads:
        thread.join(_LONG)
        assert not thread.is_alive()
    assert not failures, failures[0]


def _await(condition: Callable[[], bool], failures: Sequence[str]) -> None:
    deadline = time.monotonic() + _LONG
    while not condition():
        assert not failures, failures[0]
        assert time.monotonic() < deadline, "it is not well again"
        time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.recovery", description=__doc__.split("\n")[0])
    parser.add_argument("--store", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a fault lasts")
    parser.add_argument("--fault", action="append")
    arguments = parser.parse_args()
    print("| store | fault | append acknowledged after | at most | listener has it after | at most | lost answers |")
    with TemporaryDirectory() as folder, host(arguments.store, Path(folder)) as running:
        for fault in arguments.fault or running.faults:
            trials = []
            for _ in range(arguments.rounds):
                with running.fresh_store(Path(folder)) as url:
                    trials.append(try_out(running, url, fault, arguments.seconds))
            answered, heard = [each.answered for each in trials], [each.heard for each in trials]
            print(
                f"| {running.kind} | {fault} | {median(answered):.2f} s | {max(answered):.2f} s | "
                f"{median(heard):.2f} s | {max(heard):.2f} s | {sum(each.lost_answers for each in trials)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
