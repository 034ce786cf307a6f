"""A call of the store that fails once is repeated: who asks about a stream does not notice it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from typing import Final

import pytest

import readergroup as rg
from synchronizer import open_store
from synchronizer.testing import FailingStore, Operation

STREAM: Final = "shop/orders"
GROUP: Final = "billing"

#: What may be asked, with a fresh reader of the group. An answer is compared, so it has no times in it.
QUESTIONS: Final[dict[str, Callable[[rg.Client, rg.Reader[bytes]], object]]] = {
    "streams.info": lambda client, reader: client.streams.info(STREAM).watermark,
    "streams.exists": lambda client, reader: client.streams.exists(STREAM),
    "streams.list": lambda client, reader: list(client.streams.list()),
    "streams.retain": lambda client, reader: client.streams.retain(STREAM, dry_run=True).deleted_bytes,
    "reader.time_window": lambda client, reader: reader.time_window(STREAM),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_is_the_same_if_any_call_of_the_store_fails_once(question: str) -> None:
    store = FailingStore(open_store("memory://"))
    ask, this_thread = QUESTIONS[question], threading.get_ident()
    until_failure, failed = 0, False

    def fail(operation: Operation) -> None:
        nonlocal until_failure, failed
        if threading.get_ident() == this_thread:
            until_failure -= 1
            if until_failure == 0:
                failed = True
                raise rg.StoreUnavailableError("away")

    with rg.Client(store) as client:
        load = rg.ScalingPolicy.by_event_rate(1000)
        client.streams.create(STREAM, scaling=load, retention=rg.RetentionPolicy(max_bytes=1 << 20))
        with client.writer(STREAM) as writer:
            writer.write(b"x", event_time=datetime(2026, 1, 1, tzinfo=UTC))
            writer.note_time(datetime(2026, 1, 2, tzinfo=UTC))
        group = client.groups.create(GROUP, streams=[STREAM])
        with group.reader() as reader:
            expected = ask(client, reader)
        for until_failure in count(1):
            failed = False
            with group.reader() as reader:
                left, store.before = until_failure, fail
                try:
                    assert ask(client, reader) == expected, left
                finally:
                    store.before = None
            if not failed:
                break
    assert left > 1, "the store was not asked"
