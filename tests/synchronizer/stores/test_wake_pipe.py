"""The pipe that wakes a thread out of its poll."""

import select
import threading
from io import FileIO

from synchronizer.stores.wake_pipe import WakePipe
from tests.waiting import PATIENCE_SECONDS


def is_woken(pipe: WakePipe) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(0))


def test_it_is_readable_from_a_wake_until_it_is_cleared() -> None:
    pipe = WakePipe()
    assert not is_woken(pipe)
    pipe.wake()
    pipe.wake()
    assert is_woken(pipe)
    pipe.clear()
    pipe.clear()
    assert not is_woken(pipe)
    pipe.close()


def test_a_full_pipe_does_not_hold_up_whoever_wakes() -> None:
    pipe = WakePipe()
    for _ in range(100_000):  # Linux keeps 64 KiB
        pipe.wake()
    assert is_woken(pipe)
    pipe.close()


def test_a_closed_one_wakes_nobody_and_may_be_closed_again() -> None:
    pipe = WakePipe()
    pipe.close()
    pipe.wake()
    pipe.close()
    assert pipe._writer.closed


def test_it_is_not_closed_while_a_thread_writes_to_it() -> None:
    """Else the byte could go to another file, which got the descriptor meanwhile."""
    pipe = WakePipe()
    is_writing, was_closed = threading.Event(), threading.Event()

    class Slow(FileIO):
        closed_within_write = False

        def write(self, data: object) -> int:
            is_writing.set()
            self.closed_within_write = was_closed.wait(0.3)
            return 0

    pipe._writer = slow = Slow(pipe._writer.fileno(), "w", closefd=False)

    def close() -> None:
        is_writing.wait(PATIENCE_SECONDS)
        pipe.close()
        was_closed.set()

    closing = threading.Thread(target=close)
    closing.start()
    pipe.wake()
    closing.join(PATIENCE_SECONDS)
    assert was_closed.is_set() and not slow.closed_within_write
