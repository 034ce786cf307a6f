"""What a process does beside its work, so that the work meets it in the middle of anything.

It opens a second client on the store and closes it, forks, is interrupted, and runs out of file descriptors.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import readergroup as rg
from tests.chaos.diaries import DiaryFile
from tests.chaos.plan import Beside, Life
from tests.readergroup.reader_processes import STREAM

T = TypeVar("T")

_PAUSE_SECONDS: Final = (0.01, 0.3)
#: So long a child lives, also one whose parent was killed.
_CHILD_SECONDS: Final = (0.0, 0.3)
#: After an interrupt the work is left in peace, so that it comes to something.
_REST_SECONDS: Final = 0.5
#: So long there is no file descriptor left.
_EXHAUSTED_SECONDS: Final = (0.05, 1.0)
_WRONG: Final = 3


class InterruptibleWork:
    """Begins the work again whenever an interrupt has broken it off. Interrupts count only while it is done."""

    def __init__(self, diary: DiaryFile) -> None:
        self.times_begun = 0
        self._diary = diary

    def run(self, work: Callable[[], T]) -> T:
        while True:
            self.times_begun += 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                result = work()
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # raises what has come meanwhile
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                self._diary.note("interrupted")
            else:
                return result


@contextmanager
def beside(life: Life, url: str, client: rg.Client, diary: DiaryFile) -> Iterator[None]:
    """Inside, threads do what the plan says of this life. What goes wrong there is noted as of any thread."""
    stop = threading.Event()
    threads = [
        threading.Thread(
            target=_repeat, args=(what, random.Random(f"{life.seed} {what}"), url, client, diary, stop), name=what
        )
        for what in life.beside
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _repeat(
    what: Beside, rng: random.Random, url: str, client: rg.Client, diary: DiaryFile, stop: threading.Event
) -> None:
    while not stop.wait(rng.uniform(*_PAUSE_SECONDS)):
        match what:
            case "second client":
                _come_and_go(url)
            case "forks":
                _fork(rng.uniform(*_CHILD_SECONDS), url, client)
            case "interrupts":
                os.kill(os.getpid(), signal.SIGINT)
                stop.wait(_REST_SECONDS)
            case "exhaustion":
                _exhaust(rng.uniform(*_EXHAUSTED_SECONDS), stop)
        diary.note("beside", kind=what)


def _come_and_go(url: str) -> None:
    with suppress(rg.StoreUnavailableError, rg.DeadlineExceededError), rg.connect(url, must_exist=True) as second:
        second.streams.info(STREAM)


def _fork(seconds: float, url: str, client: rg.Client) -> None:
    child = os.fork()
    if not child:
        os._exit(_live(seconds, url, client))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise AssertionError(f"a child ended with code {code}")


def _exhaust(seconds: float, stop: threading.Event) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    try:
        stop.wait(seconds)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _live(seconds: float, url: str, client: rg.Client) -> int:
    """The child may use nothing of its parent's, and closes it all the same."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        client.store.info(STREAM)
        return _WRONG
    except rg.ClosedError:
        pass
    except BaseException:
        return _WRONG
    if url.startswith("sqlite:"):
        try:
            rg.connect(url).close()
            return _WRONG
        except rg.ClosedError:
            pass
        except BaseException:
            return _WRONG
    client.close()
    gc.collect()
    time.sleep(seconds)
    return 0
