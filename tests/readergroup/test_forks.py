"""A process that forks while it has everything open that a client has to offer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import readergroup as rg
from tests.places import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

#: Ends in the child as in the parent: everything is closed, in the order that the blocks say.
PROGRAM = """
import logging, os, sys
from contextlib import ExitStack
from datetime import UTC, datetime

from pydantic import BaseModel
import readergroup as rg

class Settings(BaseModel):
    size: int = 1

logging.basicConfig(level="WARNING")
url, how = sys.argv[1:]
with ExitStack() as opened:
    client = opened.enter_context(rg.connect(url))
    client.streams.create("shop/orders")
    writer = opened.enter_context(client.writer("shop/orders"))
    writer.write(b"stored", routing_key="k")
    writer.flush()
    group = client.groups.create("billing", streams=["shop/orders"])
    group.reader_notifier.listen(lambda notification: None)
    reader = opened.enter_context(group.reader("r1"))
    numbers = client.shared_map("numbers", int)
    numbers["one"] = 1
    client.shared_set("names", str), client.shared_config("settings", Settings), client.counter("visits")
    opened.enter_context(client.event_queue("jobs")).add(b"job")
    opened.enter_context(client.event_processor("other-jobs", lambda event: None))
    membership = opened.enter_context(client.membership("workers", "w1"))
    election = opened.enter_context(client.leader_election("leader", "c1"))
    election.campaign()
    held = opened.enter_context(client.lock("lock"))
    barrier = client.barrier("barrier", 2)
    writer.write(b"on its way", routing_key="k")
    timed = opened.enter_context(client.writer("shop/orders", event_time="now"))
    writer.note_time(datetime.now(UTC))

    child = os.fork()
    if not child:
        if how == "closes each":
            for each in (barrier, election, membership, reader, group, writer, timed, numbers):
                each.close()
            client.streams.close()
            client.groups.close()
            group.reader_notifier.close()
            client.close()
        elif how == "ends at once":
            os._exit(0)
    else:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        held.check()
        assert list(group.online_readers()) == ["r1"]
        assert list(membership.members()) == ["w1"]
        assert numbers["one"] == 1 and "two" not in numbers
        numbers["two"] = 2
        writer.flush()
        assert [reader.read(timeout=60).data for _ in range(2)] == [b"stored", b"on its way"]
        assert reader.read(timeout=0) is None
        print("the parent goes on")
"""


@pytest.mark.stores(round_robin=True)
@pytest.mark.parametrize("how", ["leaves its blocks", "closes each", "ends at once"])
def test_a_forked_child_leaves_everything_to_its_parent_without_a_word(shared_store_url: str, how: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, shared_store_url, how]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    said = [line for line in ran.stderr.splitlines() if "sync_interval" not in line]  # of NATS, about durability
    assert (ran.returncode, ran.stdout, said) == (0, "the parent goes on\n", [])
    with rg.connect(shared_store_url) as client:
        assert client.shared_map("numbers", int)["two"] == 2


#: The child goes on with the loop that it inherits, between two events that the parent has read ahead.
LOOP = """
import os, sys
import readergroup as rg

with rg.connect(sys.argv[1]) as client:
    client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(1))
    with client.writer("shop/orders") as writer:
        writer.write_many([b"0", b"1", b"2"], routing_key="k")
    reader = client.groups.create("billing", streams=["shop/orders"]).reader("r1")
    events = iter(reader)
    assert next(events).data == b"0"
    child = os.fork()
    if not child:
        try:
            next(events)
        except rg.ReaderGroupError:
            os._exit(0)
        except BaseException:
            os._exit(2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [next(events).data for _ in range(2)] == [b"1", b"2"]
    reader.close()
"""


def test_a_forked_child_gets_no_event_of_a_loop_that_it_inherits(shared_store_url: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", LOOP, shared_store_url]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
