"""However long a state is used, what it takes stays about as large as the state: in the store and in the processes."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import synchronizer
from synchronizer import AppliedUpdate, Revision, SegmentStore, open_store
from tests.synchronizer.accounts import Account, Add, Put, opened
from tests.waiting import until

KEYS = 20
COMPACTION_BYTES = 8_000
#: How deep below the synchronizer something may be allocated.
FRAMES = 4


def kept(store: SegmentStore) -> int:
    """The bytes that the store holds, in the log and in snapshots."""
    held = [store.info(segment) for segment in store.list()]
    return sum(each.length - each.start_offset for each in held)


def allocated() -> int:
    """What the synchronizer and those that it calls have allocated, and nobody else in this process."""
    gc.collect()
    its_own = tracemalloc.Filter(True, f"{Path(synchronizer.__file__).parent}/*", all_frames=True)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([its_own]).traces)


def test_the_log_and_the_memory_of_every_process_stay_bounded() -> None:
    with open_store("memory://") as store:
        writer, follower = (opened(store, compaction_bytes=COMPACTION_BYTES) for _ in range(2))
        heard = Revision(0, 0)

        def hear(applied: AppliedUpdate[Account]) -> None:
            nonlocal heard
            heard = applied.revision

        follower.on_update(hear)

        def use() -> int:
            """The most that the store holds meanwhile."""
            most = 0
            for number in range(500):
                writer.update_state_unconditionally(Put(key=f"key-{number % KEYS}", value=number), Add())
                most = max(most, kept(store))
            until(lambda: heard == writer.revision, "the listener")
            return most

        tracemalloc.start(FRAMES)
        try:
            most, before = use(), allocated()
            for _ in range(3):
                most = max(most, use())
            grown = allocated() - before
        finally:
            tracemalloc.stop()
        assert writer.applied_length > 10 * COMPACTION_BYTES
        # What came since the mark before the last one, each of them up to half late, and a snapshot.
        assert most < 4 * COMPACTION_BYTES
        assert grown < writer.applied_length / 2
