"""A process that forks at random moments while its threads use a store; run as a program by test_forks.py.

Each child is refused the store that it inherited, uses one of its own, and ends in one way or another. Prints the
numbers of the children and of the appends that were acknowledged.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

from synchronizer.errors import ClosedError
from synchronizer.store import Appended, SegmentStore
from synchronizer.stores import open_store

PATIENCE_SECONDS = 60


def main(url: str, childs_url: str, seed: int, children: int) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # of Python, about forks of threads: these are what is tested
    rng = random.Random(seed)
    stop = threading.Event()
    with open_store(url) as store:
        store.create("s")
        work = [appends(store, number, stop) for number in range(2)] + [reads(store, stop), waits(store, stop)]
        threads = [threading.Thread(target=each, daemon=True) for each in work]
        for thread in threads:
            thread.start()
        for number in range(children):
            time.sleep(rng.random() * 0.01)
            kind = rng.randrange(3)
            child = os.fork()
            if not child:
                return live(store, childs_url, number, kind)
            status = os.waitpid(child, 0)[1]
            assert os.waitstatus_to_exitcode(status) == 0, (number, status)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
        records = store.read("s", 0, 1 << 24).split(b";")[:-1]
        assert len(records) == len(set(records)) == sum(acknowledged), (len(records), acknowledged)
    print(children, sum(acknowledged))


acknowledged = [0, 0]


def appends(store: SegmentStore, number: int, stop: threading.Event) -> Callable[[], None]:
    def run() -> None:
        while not stop.is_set():
            assert isinstance(store.append("s", b"%d:%d;" % (number, acknowledged[number])), Appended)
            acknowledged[number] += 1

    return run


def reads(store: SegmentStore, stop: threading.Event) -> Callable[[], None]:
    def run() -> None:
        while not stop.is_set():
            store.read("s", 0, 100)
            with store.fair_lock("s", 1):
                pass

    return run


def waits(store: SegmentStore, stop: threading.Event) -> Callable[[], None]:
    def run() -> None:
        while not stop.is_set():
            store.wait({"s": store.info("s").length}, 0.1)

    return run


def live(inherited: SegmentStore, url: str, number: int, kind: int) -> None:
    """Return, or end at once. Of the parent's store nothing may be used; what becomes of it is the child's business."""
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    try:
        inherited.append("s", b"lost")
    except ClosedError:
        pass
    else:
        os._exit(1)
    with open_store(url) as store:
        name = f"child{number}"
        assert store.create(name)
        assert store.append(name, b"data", expected_offset=0) == Appended(0, 4)
        assert store.wait({name: 0}, PATIENCE_SECONDS) == {name}
        assert store.read(name, 0, 10) == b"data"
    if kind == 0:
        os._exit(0)
    if kind == 1:
        inherited.close()
    del inherited
    gc.collect()


def refuse_warnings(*arguments: object) -> NoReturn:
    os._exit(3)


if __name__ == "__main__":
    sys.unraisablehook = refuse_warnings
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
