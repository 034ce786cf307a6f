"""The values of attributes that have no test of their own are written and read as in the first release."""

from __future__ import annotations

import json
from collections.abc import Callable

from readergroup.scaling.autoscale import Told
from readergroup.streams.copy_parts import CopyPart, copied_bytes, copy_part
from readergroup.streams.data.block import encode_block
from readergroup.streams.transactions import merging
from readergroup.streams.writing import event_numbers
from synchronizer import Deadline, SystemClock, open_store
from synchronizer.backoff import Backoff
from synchronizer.liveness.exclusive_role import RoleValue
from synchronizer.liveness.lease import encode_lease
from synchronizer.recipes.queue import dead_letters
from synchronizer.recipes.queue.event_queue import handled_upto
from tests.golden import golden
from tests.waiting import PATIENCE_SECONDS

HOLDER = b"\x00holder\xff"
#: What is written, how it is read, and what is read then.
VALUES: dict[str, tuple[bytes, Callable[[bytes], object], object]] = {
    "position of a queue's consumer": (
        RoleValue(HOLDER, 3, (700, 10.0)).encode(),
        lambda value: handled_upto(RoleValue.decode(value)),
        700,
    ),
    "memory of autoscaling": (
        RoleValue(HOLDER, 3, Told(4, 8)).encode(),
        lambda value: Told(*RoleValue.decode(value).payload),
        Told(4, 8),
    ),
    "lease of a member": (encode_lease(3, None), bytes, encode_lease(3, None)),
    "last dead letter": (dead_letters._encode_last(HOLDER, 700), bytes, dead_letters._encode_last(HOLDER, 700)),
    "number of a writer's last event": (
        event_numbers.encode(7, 1_700_000_000.5),
        lambda value: [event_numbers._is_old(value, now) for now in (1_700_086_400.4, 1_700_086_400.6)],
        [False, True],
    ),
    "progress of a merge": (merging._PROGRESS.pack(3, 1, 700), merging._PROGRESS.unpack, (3, 1, 700)),
}


def test_values_of_attributes_are_written_and_read_as_in_the_first_release() -> None:
    today = {name: written.hex() for name, (written, _, _) in VALUES.items()}
    stored = json.loads(golden("attributes-v1.json", json.dumps(today, indent=1).encode()))
    assert stored == today
    for name, (_, read, expected) in VALUES.items():
        assert read(bytes.fromhex(stored[name])) == expected, name


def test_the_progress_of_a_copy_is_written_and_read_as_in_the_first_release() -> None:
    block = encode_block([bytes(200)], written_at=0, writer_id=bytes(16), first_number=0)
    part = CopyPart(source="source", target="target", start=0, end=len(block))
    clock = SystemClock()
    with open_store("memory://") as store:
        store.create("source")
        store.append("source", block)
        copying = copy_part(store, part, lambda: Backoff(clock, Deadline(clock, PATIENCE_SECONDS)))
        assert [next(copying), next(copying)] == [0, len(block)]
        today = store.attributes("target")
        assert copied_bytes(store, part) == len(block)
    assert {name: value.hex() for name, value in today.items()} == {"copied": "0000000000000102"}
