from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import multiprocessing
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pyarrow
import pytest
from pydantic import BaseModel

import readergroup as rg
from readergroup.scaling import pool as pool_module
from readergroup.scaling import worker_process
from readergroup.scaling.in_hand import InHand, SharedHand
from readergroup.scaling.worker import Worker
from readergroup.sinks import SqlSink
from synchronizer import StoreUnavailableError, open_store
from synchronizer.testing import FailingStore, Operation
from tests.clean_processes import CLEAN
from tests.readergroup.scaling.handlers import (
    Diary,
    DieAlwaysAt,
    DieAlwaysAtAndHearLate,
    DieAt,
    FailAt,
    FailForItself,
    Fault,
    ForkAt,
    HoldAt,
    InThread,
    LeaveThreadAt,
    Note,
    NoteRows,
    dead_letters,
    write,
)
from tests.servers.proxy import TcpProxy
from tests.waiting import PATIENCE_SECONDS, until

STREAM = "shop/orders"
DEAD = "shop/orders-dead"
SINK = SqlSink(lambda: sqlite3.connect(":memory:"))
#: As short as liveness allows on a busy machine.
READER_TIMEOUT_SECONDS = 2.0


@pytest.fixture
def group(client: rg.Client) -> rg.ReaderGroup:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    return client.groups.create("billing", streams=[STREAM], reader_timeout_seconds=READER_TIMEOUT_SECONDS)


@pytest.fixture
def diary(tmp_path: Path) -> Diary:
    (tmp_path / "diary").mkdir()
    return Diary(tmp_path / "diary")


@pytest.fixture(autouse=True)
def worker_processes_begin_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned, as pools do it, are those of the first test on all stores, and those of programs."""
    if request.function is not test_every_event_is_handled_once_and_run_returns_at_the_end_of_the_data:
        monkeypatch.setattr(worker_process, "_spawn", CLEAN)


@pytest.fixture(params=["thread", "process"])
def workers(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def texts(number: int) -> list[str]:
    return [f"e{index:05}" for index in range(number)]


def one_key(client: rg.Client, number: int) -> list[str]:
    """Write events that lie in one segment, in their order, and seal the stream."""
    write(client, STREAM, texts(number), keys=1)
    client.streams.seal(STREAM)
    return texts(number)


def fast(attempts: int, dead: str | None = None) -> rg.RetryPolicy:
    return rg.RetryPolicy(attempts=attempts, first_delay_seconds=0.001, dead_letters=dead)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_in_order_per_owner_and_key(diary: Diary) -> None:
    """Each owner of a segment hands out the events of a key in the order in which they were written."""
    last: dict[tuple[int, str, str], str] = {}
    for token, segment, key, text in diary.lines:
        assert last.get((token, segment, key), "") < text
        last[token, segment, key] = text


# ---------------------------------------------------------------------- the way of events


@pytest.mark.stores(round_robin=True)
def test_every_event_is_handled_once_and_run_returns_at_the_end_of_the_data(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, workers: str
) -> None:
    group.configure(reader_timeout_seconds=600)  # a slow reader keeps its lease
    write(client, STREAM, texts(3000))
    client.streams.seal(STREAM)
    pool = group.pool(Note(diary), readers=2, workers=workers)  # type: ignore[call-overload]
    pool.run()
    assert sorted(diary.texts) == texts(3000)
    assert_in_order_per_owner_and_key(diary)
    assert group.online_readers() == []
    assert group.lag().events == 0
    if workers == "process":
        assert os.getpid() not in diary.pids
    else:
        assert diary.pids == {os.getpid()}


def test_batches_are_handled_whole(client: rg.Client, group: rg.ReaderGroup, diary: Diary, workers: str) -> None:
    write(client, STREAM, texts(5000))
    client.streams.seal(STREAM)
    group.pool(handle_batch=Note(diary).batch, workers=workers).run()  # type: ignore[call-overload]
    assert sorted(diary.texts) == texts(5000)
    assert_in_order_per_owner_and_key(diary)


def test_batches_are_handled_as_arrow(client: rg.Client, group: rg.ReaderGroup, diary: Diary, workers: str) -> None:
    write(client, STREAM, texts(5000))
    client.streams.seal(STREAM)
    group.pool(handle_arrow=Note(diary).arrow, workers=workers).run()  # type: ignore[call-overload]
    assert sorted(diary.texts) == texts(5000)
    assert_in_order_per_owner_and_key(diary)
    assert group.lag().events == 0


def test_arrow_has_the_columns_that_are_named(
    client: rg.Client, group: rg.ReaderGroup, tmp_path: Path, workers: str
) -> None:
    with client.writer(STREAM) as writer:
        writer.write(b"x", headers={"id": b"7"}, event_time=datetime(2026, 1, 2, tzinfo=UTC))
    client.streams.seal(STREAM)
    rows = tmp_path / "rows"
    columns = ["headers", "event_time", "event"]
    group.pool(handle_arrow=NoteRows(rows), columns=columns, workers=workers).run()  # type: ignore[call-overload]
    expected = {"headers": "[('id', b'7')]", "event_time": "2026-01-02 00:00:00+00:00", "event": "b'x'"}
    assert rows.read_text() == f"{expected}\n"


def test_arrow_that_fails_is_retried_and_set_aside_event_by_event(client: rg.Client, group: rg.ReaderGroup) -> None:
    write(client, STREAM, texts(300))
    client.streams.create(DEAD)
    client.streams.seal(STREAM)
    seen: list[bytes] = []

    def handle(batch: pyarrow.RecordBatch) -> None:
        events = batch["event"].to_pylist()
        if b"e00007" in events:
            raise ValueError("no such article")
        seen.extend(events)

    group.pool(handle_arrow=handle, retry=fast(2, DEAD)).run()
    assert sorted(seen) == [text.encode() for text in texts(300) if text != "e00007"]
    assert [letter.data.data for letter in dead_letters(client, DEAD)] == [b"e00007"]


def test_a_serializer_types_what_the_handler_gets(client: rg.Client, group: rg.ReaderGroup) -> None:
    with client.writer(STREAM, serializer=rg.JsonSerializer()) as writer:
        writer.write({"id": 1})
    client.streams.seal(STREAM)
    seen: list[object] = []
    group.pool(lambda event: seen.append(event.data), serializer=rg.JsonSerializer()).run()
    assert seen == [{"id": 1}]


class Parcel(BaseModel):
    weight: int


@pytest.mark.parametrize(
    ("serializer", "says"),
    [
        (rg.PydanticSerializer(Parcel), "PydanticSerializer could not decode the event at shop/orders/"),
        (None, "The pool has no serializer, so the data of an event is bytes."),
    ],
    ids=["wrong", "none"],
)
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_wrong_or_missing_serializer_is_named_in_the_error(
    client: rg.Client,
    group: rg.ReaderGroup,
    caplog: pytest.LogCaptureFixture,
    serializer: Any,
    says: str,
    concurrency: int,
) -> None:
    with client.writer(STREAM, serializer=rg.JsonSerializer()) as writer:
        writer.write({"id": 1})
    client.streams.seal(STREAM)
    client.streams.create(DEAD)

    def run(retry: rg.RetryPolicy) -> None:
        group.pool(lambda event: event.data["id"], serializer=serializer, retry=retry, concurrency=concurrency).run()

    with pytest.raises(rg.HandlerError, match=says):
        run(fast(2))
    run(fast(2, DEAD))
    (record,) = [each for each in caplog.records if "was moved to the dead letters" in each.message]
    assert logging.Formatter().format(record).count(says) == 1


def test_an_error_that_has_nothing_to_do_with_bytes_gets_no_note(client: rg.Client, group: rg.ReaderGroup) -> None:
    one_key(client, 1)
    with pytest.raises(rg.HandlerError) as raised:
        group.pool(lambda event: None + 1).run()  # type: ignore[operator]
    assert "notes" not in raised.value.facts


def test_events_written_while_the_pool_runs_are_handled(client: rg.Client, group: rg.ReaderGroup) -> None:
    seen: list[bytes] = []
    pool = group.pool(lambda event: seen.append(event.raw), readers=2)
    running = InThread(pool.run)
    write(client, STREAM, ["one", "two"])
    until(lambda: len(seen) == 2)
    write(client, STREAM, ["three"])
    client.streams.seal(STREAM)
    running.join()
    assert sorted(seen) == [b"one", b"three", b"two"]


@pytest.mark.parametrize(("readers", "words"), [(1, "drains 1 worker"), (2, "drains 2 workers")])
def test_a_stopped_pool_logs_how_many_workers_it_drains(
    group: rg.ReaderGroup, caplog: pytest.LogCaptureFixture, readers: int, words: str
) -> None:
    pool = group.pool(print, readers=readers)
    with caplog.at_level("INFO"):
        running = InThread(pool.run)
        until(lambda: len(group.online_readers()) == readers)
        pool.stop()
        running.join()
    assert f"the pool of {group.name} {words}" in [record.getMessage() for record in caplog.records]


def test_what_was_truncated_before_it_was_read_does_not_end_the_pool(
    client: rg.Client, group: rg.ReaderGroup, caplog: pytest.LogCaptureFixture
) -> None:
    write(client, STREAM, ["lost"], keys=1)
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    write(client, STREAM, ["kept"], keys=1)
    client.streams.seal(STREAM)
    seen: list[bytes] = []
    group.pool(lambda event: seen.append(event.raw)).run()
    assert seen == [b"kept"]
    assert "truncated" in caplog.text


# ---------------------------------------------------------------------- how many workers


@pytest.mark.stores(round_robin=True)
def test_a_pool_by_policy_grows_when_a_split_brings_segments_and_ends_at_the_end_of_the_data(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LOOK_SECONDS", 1000)  # so that it is the notification that makes it grow
    group.configure(reader_timeout_seconds=600)  # a slow reader keeps its lease
    policy = rg.ReaderScalingPolicy(min_readers=2, max_readers=4, target_lag_seconds=1000, cooldown_seconds=1000)
    hold = HoldAt(diary, "e00100")
    pool = group.pool(hold, readers=policy, workers=workers)  # type: ignore[call-overload]
    running = InThread(pool.run)
    until(lambda: len(pool.workers) == 2)
    write(client, STREAM, texts(3000))
    until(lambda: hold.holding)
    first = {worker.reader_id for worker in pool.workers}
    client.streams.scale(STREAM, split=[0, 1])
    until(lambda: len(pool.workers) == 4)
    assert pool.desired_readers == 4
    assert first < {worker.reader_id for worker in pool.workers}
    hold.let_go()
    client.streams.seal(STREAM)
    running.join()
    assert sorted(diary.texts) == texts(3000)
    assert_in_order_per_owner_and_key(diary)
    assert pool.workers == ()


def test_a_pool_whose_workers_handle_many_events_at_once_grows_less_with_the_segments(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LOOK_SECONDS", 1000)
    policy = rg.ReaderScalingPolicy(max_readers=8, target_lag_seconds=1000, cooldown_seconds=1000)
    hold = HoldAt(diary, "e00100")
    pool = group.pool(hold, readers=policy, concurrency=2)
    running = InThread(pool.run)
    write(client, STREAM, texts(300))
    until(lambda: hold.holding)
    client.streams.scale(STREAM, split=[0, 1])
    until(lambda: len(pool.workers) == 2)
    assert pool.desired_readers == 2
    hold.let_go()
    client.streams.seal(STREAM)
    running.join()
    assert sorted(diary.texts) == texts(300)


def test_a_pool_by_policy_grows_with_its_lag_and_shrinks_when_it_is_calm(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LOOK_SECONDS", 0.2)
    group.configure(position_interval_seconds=0.05)
    policy = rg.ReaderScalingPolicy(min_readers=1, max_readers=2, target_lag_seconds=1, cooldown_seconds=0.1)
    hold = HoldAt(diary, "e00000")
    pool = group.pool(hold, readers=policy)
    running = InThread(pool.run)
    write(client, STREAM, texts(100))
    until(lambda: hold.holding)
    until(lambda: len(pool.workers) == 2)
    hold.let_go()
    until(lambda: len(pool.workers) == 1)
    pool.stop()
    running.join()
    assert sorted(diary.texts) == texts(100)


def test_the_workers_can_be_looked_at_while_they_live_and_after(
    group: rg.ReaderGroup, diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "readergroup")
    pool = group.pool(Note(diary), readers=2, workers="process")
    running = InThread(pool.run)
    until(lambda: len(group.online_readers()) == 2)
    seen = pool.workers
    assert sorted(worker.reader_id for worker in seen) == group.online_readers()
    assert all(worker.alive and is_running(worker.pid) for worker in seen)
    assert all(f"{worker.reader_id} of {group.name} starts as process {worker.pid}" in caplog.text for worker in seen)
    pool.stop()
    running.join()
    assert pool.workers == ()
    assert not any(worker.alive or is_running(worker.pid) for worker in seen)


# ---------------------------------------------------------------------- workers that die


@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
def test_a_worker_process_that_dies_is_replaced_and_its_events_are_handled(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, how: str
) -> None:
    write(client, STREAM, texts(2000))
    client.streams.seal(STREAM)
    group.pool(DieAt(diary, "e01000", how), readers=2, workers="process").run()
    assert set(diary.texts) == set(texts(2000))
    assert_in_order_per_owner_and_key(diary)
    assert len(diary.pids) >= 2
    assert group.online_readers() == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOENT])
def test_a_pool_waits_while_the_system_refuses_what_a_worker_process_needs(
    client: rg.Client,
    group: rg.ReaderGroup,
    diary: Diary,
    number: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(client, STREAM, texts(100))
    client.streams.seal(STREAM)
    pipe, refused = CLEAN.Pipe, iter([True, True])

    def refuse() -> object:
        if next(refused, False):
            raise OSError(number, os.strerror(number))
        return pipe()

    monkeypatch.setattr(CLEAN, "Pipe", refuse)
    group.pool(Note(diary), workers="process").run()
    assert set(diary.texts) == set(texts(100))
    advice = "limits of this user" if number == errno.EMFILE else "directory of the program"
    assert caplog.text.count("the system cannot start another process") == 2 and advice in caplog.text


def reap(number: int, frame: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("handler", [signal.SIG_IGN, reap], ids=["ignored", "reaped"])
@pytest.mark.parametrize("how", ["kill", "never"])
def test_a_pool_works_where_the_exit_codes_of_its_workers_are_taken_by_others(
    client: rg.Client,
    group: rg.ReaderGroup,
    diary: Diary,
    handler: Any,
    how: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that ignores SIGCHLD, or waits for all of its children."""
    monkeypatch.setattr(worker_process, "_spawn", multiprocessing.get_context("spawn"))
    write(client, STREAM, texts(200))
    client.streams.seal(STREAM)
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        group.pool(DieAt(diary, "e00100" if how == "kill" else "never", "kill"), readers=2, workers="process").run()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert set(diary.texts) == set(texts(200))
    assert_in_order_per_owner_and_key(diary)
    assert group.online_readers() == []
    assert (" died: the process " in caplog.text) == (how == "kill"), caplog.text
    # At exit multiprocessing sends SIGTERM to these numbers, which other processes may have by then.
    assert multiprocessing.active_children() == []
    if handler is signal.SIG_IGN:
        assert ("the program has taken its exit code" in caplog.text) == (how == "kill"), caplog.text
    assert "did not finish" not in caplog.text


def test_what_a_killed_worker_process_had_is_given_to_others_at_once(client: rg.Client, diary: Diary) -> None:
    """They need not wait for the lease, which is an hour here."""
    client.streams.create(STREAM)
    group = client.groups.create("billing", streams=[STREAM], reader_timeout_seconds=3600)
    written = one_key(client, 3000)
    pool = group.pool(DieAt(diary, "e02000", "kill"), workers="process")
    pool.run()
    assert set(diary.texts) == set(written)
    assert_in_order_per_owner_and_key(diary)
    assert len(diary.pids) == 2


@pytest.mark.parametrize("batches", [False, True])
def test_an_event_that_kills_its_workers_is_set_aside_and_the_others_go_on(
    client: rg.Client, diary: Diary, batches: bool
) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    client.streams.create(DEAD)
    group = client.groups.create("billing", streams=[STREAM], reader_timeout_seconds=3600)
    write(client, STREAM, texts(300))
    client.streams.seal(STREAM)
    deadly = DieAlwaysAt(diary, ("e00100",))
    handler = {"handle_batch": deadly.batch} if batches else {"handle": deadly}
    pool = group.pool(**handler, readers=1 + (not batches), workers="process", retry=fast(3, DEAD))  # type: ignore[call-overload]
    pool.run()
    assert set(diary.texts) == set(texts(300)) - {"e00100"}
    (event,) = dead_letters(client, DEAD)
    assert (event.data.data, event.data.attempts) == (b"e00100", 3)
    assert "worker processes died" in event.data.error


def test_a_death_over_several_events_counts_for_one_of_them(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    client.streams.create(DEAD)
    written = one_key(client, 20)
    deadly = {"e00004", "e00005"}
    group.pool(DieAlwaysAt(diary, tuple(deadly)), workers="process", retry=fast(3, DEAD)).run()
    assert set(diary.texts) == set(written) - deadly
    assert {event.data.data.decode() for event in dead_letters(client, DEAD)} == deadly
    assert sum("died while it handled" in record.message for record in caplog.records) == 3 + 3


def test_a_worker_gets_the_events_of_a_dead_one_only_when_it_knows_of_the_death(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    client.streams.create(DEAD)
    write(client, STREAM, texts(300))
    client.streams.seal(STREAM)
    group.configure(reader_timeout_seconds=600)  # a slow reader keeps its lease
    handler = DieAlwaysAtAndHearLate(diary, ("e00100",))
    group.pool(handler, readers=2, workers="process", retry=fast(3, DEAD)).run()
    said = [record.message for record in caplog.records if "died while it handled" in record.message]
    assert len(said) == 3
    assert "died while it handled one of the events from" in said[0]  # which one is known from the second death on
    assert said[0].endswith("; deaths at one of them so far: 1")
    assert said[1].endswith("; deaths at this event so far: 1")


def test_an_event_that_kills_its_workers_stops_a_pool_without_dead_letters(client: rg.Client, diary: Diary) -> None:
    client.streams.create(STREAM)
    group = client.groups.create("billing", streams=[STREAM], reader_timeout_seconds=3600)
    written = one_key(client, 30)
    with pytest.raises(rg.HandlerError, match="3 worker processes died") as raised:
        group.pool(DieAlwaysAt(diary, ("e00010",)), workers="process").run()
    assert raised.value.facts["attempts"] == 3
    assert set(diary.texts) == set(written[:10])
    group.pool(Note(diary)).run()
    assert set(diary.texts) == set(written)


class _Ended(BaseException):
    """As the ``fail`` of a test framework."""


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize(
    "error",
    [SystemExit("enough"), asyncio.CancelledError("enough"), GeneratorExit("enough"), _Ended("enough")],
    ids=repr,
)
def test_a_handler_that_exits_its_thread_has_failed(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, error: BaseException, concurrency: int, is_async: bool
) -> None:
    client.streams.create(DEAD)
    written = one_key(client, 20)

    def handle(event: rg.Event[bytes]) -> None:
        if event.raw == b"e00007":
            raise error
        diary.note(event)

    async def handle_async(event: rg.Event[bytes]) -> None:
        handle(event)

    group.pool(handle_async if is_async else handle, concurrency=concurrency, retry=fast(2, DEAD)).run()
    assert sorted(diary.texts) == [text for text in written if text != "e00007"]
    (letter,) = dead_letters(client, DEAD)
    assert letter.data.attempts == 2
    assert type(error).__name__ in letter.data.error


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_handler_that_cancels_its_own_task_has_failed(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, concurrency: int
) -> None:
    client.streams.create(DEAD)
    written = one_key(client, 20)

    async def handle(event: rg.Event[bytes]) -> None:
        if event.raw == b"e00007":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(1000)
        diary.note(event)

    group.pool(handle, concurrency=concurrency, retry=fast(2, DEAD)).run()
    assert sorted(diary.texts) == [text for text in written if text != "e00007"]
    (letter,) = dead_letters(client, DEAD)
    assert "the task of the handler was cancelled" in letter.data.error


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("how", ["return", "raise", "exit"])
def test_a_child_that_leaves_a_handler_ends_there(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, how: str, workers: Literal["thread", "process"]
) -> None:
    client.streams.create(DEAD)
    written = one_key(client, 20)
    group.pool(ForkAt(diary, "e00007", how), workers=workers, retry=fast(2, DEAD)).run()
    assert diary.texts == written


def test_a_worker_process_does_not_wait_for_a_thread_of_its_handler_for_ever(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary
) -> None:
    written = one_key(client, 20)
    group.pool(LeaveThreadAt(diary, "e00007"), workers="process").run(drain_timeout=1000)
    assert diary.texts == written


def test_without_dead_letters_a_handler_that_exits_its_thread_ends_the_pool(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary
) -> None:
    written = one_key(client, 100)
    with pytest.raises(rg.HandlerError, match="SystemExit"):
        group.pool(DieAt(diary, "e00050", "raise")).run()
    assert diary.texts == written[:50]


@pytest.mark.stores(round_robin=True)
def test_a_reader_taken_out_by_hand_is_replaced_by_another(client: rg.Client, group: rg.ReaderGroup) -> None:
    seen: list[bytes] = []
    pool = group.pool(lambda event: seen.append(event.raw))
    running = InThread(pool.run)
    until(lambda: len(group.online_readers()) == 1)
    (first,) = group.online_readers()
    assert group.remove_reader(first)
    until(lambda: group.online_readers() not in ([], [first]))
    write(client, STREAM, ["after"])
    client.streams.seal(STREAM)
    running.join()
    assert seen == [b"after"]


@pytest.mark.stores(round_robin=True)
def test_worker_processes_end_when_their_parent_is_killed(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, url: str
) -> None:
    group.configure(reader_timeout_seconds=600)
    program = start_pool_in_a_program(url, diary, "Note(diary)", readers=2)
    try:
        until(lambda: len(group.online_readers()) == 2)
        write(client, STREAM, texts(100))
        until(lambda: len(diary.texts) == 100)
        assert diary.pids
        program.kill()
        program.wait(PATIENCE_SECONDS)
        until(lambda: not any(map(is_running, diary.pids)))
        # They were not cut off but left in good order, without the lease running out.
        until(lambda: group.online_readers() == [])
    finally:
        program.kill()


def test_worker_processes_end_when_their_parent_is_killed_although_a_child_that_it_forked_lives_on(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, url: str
) -> None:
    group.configure(reader_timeout_seconds=600)
    forked = diary.folder / "forked"
    begin = f"""
def fork(*_):
    if child := os.fork():
        Path({str(forked)!r}).write_text(f"{{child}} ")
    else:
        signal.pause()
signal.signal(signal.SIGUSR1, fork)
"""
    program = start_pool_in_a_program(url, diary, "Note(diary)", begin=begin, readers=2)
    child = None
    try:
        until(lambda: len(group.online_readers()) == 2)
        program.send_signal(signal.SIGUSR1)
        until(lambda: forked.exists() and forked.read_text().endswith(" "))
        child = int(forked.read_text())
        program.kill()
        program.wait(PATIENCE_SECONDS)
        until(lambda: group.online_readers() == [])
        assert is_running(child)
    finally:
        program.kill()
        if child is not None:
            os.kill(child, signal.SIGKILL)


# ---------------------------------------------------------------------- stopping


def test_stop_finishes_what_is_in_hand_and_leaves_the_rest(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, workers: str
) -> None:
    write(client, STREAM, texts(500), keys=1)
    hold = HoldAt(diary, "e00200")
    pool = group.pool(hold, workers=workers)  # type: ignore[call-overload]
    running = InThread(pool.run)
    until(lambda: hold.holding)
    pool.stop()
    until(lambda: all(worker.stopping for worker in pool.workers))
    assert running.running
    hold.let_go()
    running.join()
    assert "e00200" in diary.texts
    if workers == "thread":
        assert diary.texts == texts(500)[:201]
    assert group.online_readers() == []
    client.streams.seal(STREAM)
    group.pool(Note(diary)).run()
    assert sorted(diary.texts) == texts(500)


def test_stop_before_run_returns_at_once(client: rg.Client, group: rg.ReaderGroup) -> None:
    write(client, STREAM, texts(10))
    seen: list[object] = []
    pool = group.pool(seen.append)
    pool.stop()
    pool.run()
    assert seen == []


def test_a_pool_runs_once(group: rg.ReaderGroup) -> None:
    """Another call changes nothing, such as the signal handlers that the application has set meanwhile."""
    pool = group.pool(print)
    pool.stop()
    pool.run()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(rg.InvalidArgumentError, match="can run only once"):
            pool.run()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("stubborn", [False, True], ids=["breaks off", "is killed"])
def test_a_worker_process_that_does_not_finish_in_time_is_ended_and_its_event_handled_again(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, caplog: pytest.LogCaptureFixture, stubborn: bool
) -> None:
    written = one_key(client, 100)
    hold = HoldAt(diary, "e00050", stubborn)
    pool = group.pool(hold, workers="process")
    running = InThread(lambda: pool.run(drain_timeout=0.2))
    until(lambda: hold.holding)
    (worker,) = pool.workers
    pool.stop()
    running.join()
    assert not is_running(worker.pid)
    assert "did not finish within 0.2 s; it is terminated" in caplog.text
    assert diary.texts == written[:50]
    # One that was broken off has left the group; one that was killed was taken out.
    assert group.online_readers() == []
    hold.let_go()
    group.pool(hold).run()
    assert set(diary.texts) == set(written)
    if not stubborn:
        assert sorted(diary.texts) == written


def test_a_worker_thread_that_does_not_finish_in_time_leaves_the_group_without_its_event(
    client: rg.Client, group: rg.ReaderGroup
) -> None:
    one_key(client, 100)
    is_stuck, let_go = threading.Event(), threading.Event()
    seen: list[bytes] = []

    def handle(event: rg.Event[bytes]) -> None:
        if event.raw == b"e00050":
            is_stuck.set()
            let_go.wait(60)
        seen.append(event.raw)

    pool = group.pool(handle)
    running = InThread(lambda: pool.run(drain_timeout=0.2))
    until(is_stuck.is_set)
    (worker,) = pool.workers
    pool.stop()
    running.join()
    assert group.online_readers() == []
    let_go.set()
    until(lambda: not worker.alive)
    again: list[bytes] = []
    group.pool(lambda event: again.append(event.raw)).run()
    assert again == [text.encode() for text in texts(100)[50:]]


def test_closing_the_client_stops_the_pool(url: str, client: rg.Client, group: rg.ReaderGroup, diary: Diary) -> None:
    with rg.connect(url) as other:
        hold = HoldAt(diary, "e00020")
        write(client, STREAM, texts(100), keys=1)
        running = InThread(other.groups.get("billing").pool(hold).run)
        until(lambda: hold.holding)
        closing = InThread(other.close)
        hold.let_go()
        closing.join()
    running.join()
    assert diary.texts == texts(100)[: len(diary.texts)]
    assert group.online_readers() == []


def start_pool_in_a_program(
    url: str, diary: Diary, handle: str, *, begin: str = "", **options: object
) -> subprocess.Popen[str]:
    """Only its pool ends its workers: alone, they would go on for long."""
    program = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
{begin}
import readergroup as rg
from pathlib import Path
from readergroup.scaling import worker_process
from tests.readergroup.scaling.handlers import *
worker_process.ORPHAN_SECONDS = worker_process.LEAVE_SECONDS = {PATIENCE_SECONDS}
if __name__ == "__main__":
    diary = Diary(Path({str(diary.folder)!r}))
    with rg.connect({url!r}) as client:
        pool = client.groups.get("billing").pool({handle}, workers="process", **{options!r})
        pool.run(drain_timeout={PATIENCE_SECONDS})
    print("returned")
"""
    script = diary.folder / "program.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        pytest.param(signal.SIGTERM, False, id="SIGTERM to the parent"),
        pytest.param(signal.SIGINT, True, id="SIGINT to parent and workers"),
        pytest.param(signal.SIGTERM, True, id="SIGTERM to parent and workers", marks=pytest.mark.broad),
        pytest.param(signal.SIGINT, False, id="SIGINT to the parent", marks=pytest.mark.broad),
    ],
)
def test_a_signal_drains_a_program(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, url: str, number: signal.Signals, to_all: bool
) -> None:
    """Ctrl-C in a terminal, and a service manager, send the signal to all processes."""
    write(client, STREAM, texts(500), keys=1)
    hold = HoldAt(diary, "e00200")
    program = start_pool_in_a_program(url, diary, "HoldAt(diary, 'e00200')")
    try:
        until(lambda: hold.holding)
        for pid in [*(diary.pids if to_all else ()), program.pid]:
            os.kill(pid, number)
        hold.let_go()
        out, err = program.communicate(timeout=PATIENCE_SECONDS)
        assert (out, program.returncode) == ("returned\n", 0), err
    finally:
        program.kill()
    assert "e00200" in diary.texts
    assert not any(map(is_running, diary.pids))
    assert group.online_readers() == []
    client.streams.seal(STREAM)
    group.pool(Note(diary)).run()
    assert sorted(diary.texts) == texts(500)


@pytest.mark.parametrize("handler", ["HoldAt", "DeafAt"])
def test_a_second_ctrl_c_interrupts_the_draining_and_more_leave_no_worker_behind(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, url: str, handler: str
) -> None:
    write(client, STREAM, texts(20), keys=1)
    hold = HoldAt(diary, "e00010")
    program = start_pool_in_a_program(url, diary, f"{handler}(diary, 'e00010')")
    try:
        until(lambda: hold.holding)

        def ends_after_another() -> bool:
            program.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(0.1)  # also in the midst of ending the workers
            return program.poll() is not None

        until(ends_after_another, "it ends", seconds=60)  # a drain, and the handlers, may take longer
        out, err = program.communicate(timeout=60)  # the worker has this output too, until it ends
        until(lambda: not any(map(is_running, diary.pids)), "no worker is left")
    finally:
        program.kill()
        for pid in filter(is_running, diary.pids):
            os.kill(pid, signal.SIGKILL)
    assert "KeyboardInterrupt" in err
    assert out == ""


def test_a_ctrl_c_while_a_worker_process_loads_its_modules_does_not_end_it(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, url: str
) -> None:
    written = one_key(client, 3)
    program = start_pool_in_a_program(
        url, diary, "Note(diary)", begin="if __name__ != '__main__': os.kill(os.getpid(), signal.SIGINT)"
    )
    try:
        assert program.communicate(timeout=PATIENCE_SECONDS) == ("returned\n", "")
    finally:
        program.kill()
    assert diary.texts == written


def test_no_next_worker_is_announced_while_the_pool_drains(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    one_key(client, 3)
    hold = HoldAt(diary, "e00001")
    pool = group.pool(hold, workers="process")
    running = InThread(pool.run)
    until(lambda: hold.holding)
    (worker,) = pool.workers
    pool.stop()
    os.kill(worker.pid, signal.SIGKILL)
    running.join()
    assert f"worker {worker.reader_id} died: the process {worker.pid} was killed by signal 9" in caplog.text
    assert "the next worker starts" not in caplog.text


def test_signal_handlers_are_put_back(group: rg.ReaderGroup) -> None:
    def before(number: int, frame: object) -> None: ...

    saved = {number: signal.signal(number, before) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        pool = group.pool(print)
        during: list[object] = []

        def stop() -> None:
            until(lambda: pool.workers)
            during.append(signal.getsignal(signal.SIGTERM))
            os.kill(os.getpid(), signal.SIGTERM)

        stopping = InThread(stop)
        pool.run()
        stopping.join()
        assert during != [before]
        assert [signal.getsignal(number) for number in saved] == [before, before]
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------- handlers that fail


def test_an_event_is_tried_again_and_its_segment_waits(client: rg.Client, group: rg.ReaderGroup) -> None:
    written = one_key(client, 20)
    seen: list[str] = []
    failures = 3

    def handle(event: rg.Event[bytes]) -> None:
        nonlocal failures
        if event.raw == b"e00007" and failures:
            failures -= 1
            raise Fault
        seen.append(event.raw.decode())

    group.pool(handle, retry=fast(4)).run()
    assert failures == 0
    assert seen == written


def test_stop_interrupts_the_pause_before_the_next_attempt(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, workers: str, caplog: pytest.LogCaptureFixture
) -> None:
    written = one_key(client, 20)
    retry = rg.RetryPolicy(attempts=2, first_delay_seconds=1000, max_delay_seconds=1000)
    pool = group.pool(FailAt(diary, ("e00007",)), retry=retry, workers=workers)  # type: ignore[call-overload]
    running = InThread(lambda: pool.run(drain_timeout=1000))
    until(lambda: len(diary.texts) == 7)
    pool.stop()
    running.join()
    group.pool(Note(diary)).run()
    assert sorted(diary.texts) == written


def test_an_event_that_fails_to_the_last_is_set_aside_whole_and_the_others_go_on(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, workers: str
) -> None:
    client.streams.create(DEAD)
    damaged = b"\xff\x00 damaged"
    with client.writer(STREAM) as writer:
        writer.write(b"one", routing_key="alice")
        writer.write(damaged, routing_key="alice", headers={"trace": b"\x01"})
        writer.write(b"two", routing_key="alice")
    client.streams.seal(STREAM)
    pool = group.pool(Note(diary), retry=fast(3, DEAD), workers=workers)  # type: ignore[call-overload]
    pool.run()
    assert diary.texts == ["one", "two"]
    (event,) = dead_letters(client, DEAD)
    letter = event.data
    assert (letter.data, letter.attempts) == (damaged, 3)
    assert letter.error.startswith("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff")
    assert letter.pointer.segment.startswith("shop/orders/")
    assert rg.EventPointer.parse(str(letter.pointer)) == letter.pointer
    assert (event.routing_key, event.headers) == ("alice", {"trace": b"\x01"})


@pytest.mark.stores(round_robin=True)
def test_of_a_batch_only_what_fails_alone_is_set_aside(client: rg.Client, group: rg.ReaderGroup, diary: Diary) -> None:
    client.streams.create(DEAD)
    written = texts(1500)
    for start in range(0, 1500, 300):  # so that a batch has several blocks
        write(client, STREAM, written[start : start + 300], keys=1)
    client.streams.seal(STREAM)
    bad = ("e00000", "e00007", "e00620", "e01400")
    group.pool(handle_batch=FailAt(diary, bad).batch, retry=fast(2, DEAD)).run()
    assert set(diary.texts) == set(written) - set(bad)
    assert [event.data.data.decode() for event in dead_letters(client, DEAD)] == list(bad)


@pytest.mark.stores(round_robin=True)
@pytest.mark.parametrize("batches", [False, True], ids=["events", "batches"])
def test_what_is_set_aside_is_logged_with_the_traceback_of_its_last_attempt(
    client: rg.Client, group: rg.ReaderGroup, caplog: pytest.LogCaptureFixture, batches: bool
) -> None:
    attempts = 0

    def handle(_: object) -> None:
        nonlocal attempts
        attempts += 1
        try:
            raise KeyError(f"cause {attempts}")
        except KeyError as error:
            raise Fault(f"attempt {attempts}") from error

    client.streams.create(DEAD)
    one_key(client, 1)
    if batches:
        group.pool(handle_batch=handle, retry=fast(2, DEAD)).run()
    else:
        group.pool(handle, retry=fast(2, DEAD)).run()
    (record,) = [each for each in caplog.records if "was moved to the dead letters" in each.message]
    text = logging.Formatter().format(record)
    assert f"Fault: attempt {attempts}" in text and f"KeyError: 'cause {attempts}'" in text
    assert text.count("Traceback") == 2, text


@pytest.mark.stores(round_robin=True)
def test_an_event_counts_only_when_its_dead_letter_is_stored(store_url: str, diary: Diary) -> None:
    store = FailingStore(open_store(store_url))
    full = True
    attempts = refused = 0

    def no_room_for_the_dead(operation: Operation) -> None:
        nonlocal refused
        if full and operation.verb == "append" and operation.segment.startswith(f"data/{DEAD}"):
            refused += 1
            raise rg.StoreFullError("no room")

    def handle(event: rg.Event[bytes]) -> None:
        nonlocal attempts
        if event.raw == b"e00005":
            attempts += 1
            raise Fault
        diary.note(event)

    store.before = no_room_for_the_dead
    with store, rg.Client(store, timeout=0.5) as client:
        client.streams.create(STREAM)
        client.streams.create(DEAD)
        group = client.groups.create("billing", streams=[STREAM])
        written = one_key(client, 10)
        running = InThread(group.pool(handle, retry=fast(1, DEAD)).run)
        until(lambda: refused >= 10, "for longer than the timeout")
        assert diary.texts == written[:5]
        full = False
        running.join()
        assert attempts == 1
        assert diary.texts == written[:5] + written[6:]
        assert [event.data.data for event in dead_letters(client, DEAD)] == [b"e00005"]


class FailsInAnOutage:
    """Fails at the sixth event, when the store has just gone away. Remembers which worker handled which event."""

    def __init__(self, go_away: Callable[[], object]) -> None:
        self.go_away = go_away
        self.failed = threading.Event()
        self.handled: list[str] = []
        self.workers: set[str] = set()
        self.pool: rg.ReaderPool[bytes] | None = None

    def __call__(self, event: rg.Event[bytes]) -> None:
        assert self.pool is not None
        self.workers |= {worker.reader_id for worker in self.pool.workers}
        self.handled.append(event.data.decode())
        if event.raw == b"e00005" and not self.failed.is_set():
            self.go_away()
            self.failed.set()
            raise Fault


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.stores("sqlite")
def test_a_worker_whose_handler_fails_in_an_outage_goes_on_after_it(store_url: str, concurrency: int) -> None:
    refused = 0

    def away(operation: Operation) -> None:
        nonlocal refused
        refused += threading.current_thread().name.startswith("worker ")
        raise StoreUnavailableError("away")

    handle = FailsInAnOutage(lambda: setattr(store, "before", away))
    with FailingStore(open_store(store_url)) as store, rg.Client(store, timeout=0.2) as client:
        client.streams.create(STREAM)
        client.streams.create(DEAD)
        group = client.groups.create("billing", streams=[STREAM])
        written = one_key(client, 10)
        pool = handle.pool = group.pool(handle, retry=fast(1, DEAD), concurrency=concurrency)
        running = InThread(pool.run)
        until(lambda: refused >= 30, "the store is away for longer than the timeout")
        store.before = None
        running.join()
        assert handle.handled == written  # and none twice
        assert len(handle.workers) == 1
        assert [event.data.data for event in dead_letters(client, DEAD)] == [b"e00005"]


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("what", ["sealed", "deleted"])
def test_an_event_that_dead_letters_do_not_take_is_named_with_the_error_of_its_handler(
    client: rg.Client, what: str, concurrency: int
) -> None:
    def handle(event: rg.Event[bytes]) -> None:
        if event.data == b"e00003":
            (client.streams.seal if what == "sealed" else client.streams.delete)(DEAD)
        if event.data in (b"e00001", b"e00003"):
            raise Fault("no amount")

    for stream in (STREAM, DEAD):
        client.streams.create(stream)
    one_key(client, 5)
    group = client.groups.create("billing", streams=[STREAM])
    with pytest.raises(rg.HandlerError, match="serializer: .*no amount.*could not be moved to the dead") as raised:
        group.pool(handle, retry=fast(1, DEAD), concurrency=concurrency).run()
    (events,) = client.batch.segment_ranges(STREAM)
    assert raised.value.facts["pointer"] == str([*client.batch.read(events)][3].pointer)
    assert isinstance(raised.value.__cause__, Fault)


def test_a_pool_hears_in_an_outage_that_it_is_stopped_although_it_has_a_dead_letter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("readergroup.scaling.worker._ATTEMPT_SECONDS", 0.2)
    asked = threading.Event()

    def handle(event: rg.Event[bytes]) -> None:
        store.before = lambda operation: asked.set()
        store.unavailable = True
        raise Fault

    with FailingStore(open_store("memory://")) as store, rg.Client(store, timeout=10 * PATIENCE_SECONDS) as client:
        for stream in (STREAM, DEAD):
            client.streams.create(stream)
        one_key(client, 1)
        pool = client.groups.create("billing", streams=[STREAM]).pool(handle, retry=fast(1, DEAD))
        running = InThread(pool.run)
        assert asked.wait(PATIENCE_SECONDS)
        pool.stop()
        running.join()
        store.unavailable = False


def test_dead_letters_go_to_the_stream_that_was_created_again(client: rg.Client) -> None:
    def handle(event: rg.Event[bytes]) -> None:
        if event.data == b"e00003":
            client.streams.delete(DEAD)
            client.streams.create(DEAD)
        if event.data in (b"e00001", b"e00003"):
            raise Fault

    for stream in (STREAM, DEAD):
        client.streams.create(stream)
    one_key(client, 5)
    group = client.groups.create("billing", streams=[STREAM])
    group.pool(handle, retry=fast(1, DEAD)).run()
    assert [letter.data.data for letter in dead_letters(client, DEAD)] == [b"e00003"]


@pytest.mark.stores("sqlite")
def test_a_worker_that_repeats_what_a_dead_one_had_in_hand_goes_on_after_an_outage(store_url: str) -> None:
    handled: list[str] = []
    refused = 0

    def away(operation: Operation) -> None:
        nonlocal refused
        refused += 1
        raise StoreUnavailableError("away")

    def handle(batch: rg.EventBatch[bytes]) -> None:
        handled.extend(event.data.decode() for event in batch)
        if handled == ["e00000"]:
            store.before = away

    with FailingStore(open_store(store_url)) as store, rg.Client(store, timeout=0.2) as client:
        client.streams.create(STREAM)
        group = client.groups.create("billing", streams=[STREAM])
        written = one_key(client, 5)
        (events,) = client.batch.segment_ranges(STREAM)
        died_over = InHand.of(next(client.batch.read(events)))
        worker = Worker(group.pool(handle_batch=handle).task, "second", SharedHand().open())
        worker.note_deaths(died_over, 1)
        running = InThread(partial(worker.run, lambda: None))
        until(lambda: refused >= 30, "the store is away for longer than the timeout")
        store.before = None
        until(lambda: len(handled) == len(written), "all events are handled")
        worker.stop()
        running.join()
        assert handled == written  # and none twice


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_pool_ends_in_an_outage_and_leaves_an_event_that_could_not_be_set_aside(concurrency: int) -> None:
    handle = FailsInAnOutage(lambda: setattr(store, "unavailable", True))
    with FailingStore(open_store("memory://")) as store, rg.Client(store, timeout=0.2) as client:
        client.streams.create(STREAM)
        client.streams.create(DEAD)
        group = client.groups.create("billing", streams=[STREAM], reader_timeout_seconds=READER_TIMEOUT_SECONDS)
        written = one_key(client, 10)
        pool = handle.pool = group.pool(handle, retry=fast(1, DEAD), concurrency=concurrency)
        running = InThread(pool.run)
        assert handle.failed.wait(PATIENCE_SECONDS)
        pool.stop()
        running.join()
        store.unavailable = False
        handle.pool = group.pool(handle, concurrency=concurrency)
        handle.pool.run()
        assert handle.handled[-5:] == written[-5:]


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.stores("postgresql")
def test_a_worker_whose_handler_fails_in_an_outage_of_a_server_goes_on_after_it(store_url: str, delays: bool) -> None:
    retries = f"{STREAM}-retries"
    port = urlsplit(store_url).port
    assert port is not None
    with rg.connect(store_url) as admin, TcpProxy(port) as proxy:
        for stream in (STREAM, DEAD, retries):
            admin.streams.create(stream)
        admin.groups.create("billing", streams=[STREAM, retries], reader_timeout_seconds=READER_TIMEOUT_SECONDS)
        write(admin, STREAM, texts(10), keys=1)
        handle = FailsInAnOutage(proxy.cut)
        retry = rg.DelayedRetry(delays=[0.01], retry_stream=retries, dead_letters=DEAD) if delays else fast(1, DEAD)
        with rg.connect(store_url.replace(f":{port}", f":{proxy.port}"), timeout=0.5) as client:
            pool = handle.pool = client.groups.get("billing").pool(handle, retry=retry)
            running = InThread(pool.run)
            assert handle.failed.wait(PATIENCE_SECONDS)
            (found,) = pool.workers
            reader = found._worker._reader  # type: ignore[attr-defined]
            until(lambda: not reader._member.is_alive(), "the lease expires, which lasts longer than the timeout")
            proxy.heal()
            until(lambda: len(handle.handled) == 10 + delays, "all events are handled")
            pool.stop()
            running.join()
        assert sorted(handle.handled) == sorted(texts(10) + ["e00005"] * delays)
        assert len(handle.workers) == 1
        assert len(list(admin.dead_letters(DEAD).list())) == 1 - delays


def test_an_event_too_large_to_be_set_aside_stays_unprocessed(client: rg.Client, group: rg.ReaderGroup) -> None:
    client.streams.create(DEAD)
    large = b"x" * (8 * 1024 * 1024)
    with client.writer(STREAM) as writer:
        writer.write(large)
    client.streams.seal(STREAM)

    def fail(event: rg.Event[bytes]) -> None:
        raise Fault("no")

    with pytest.raises(rg.HandlerError) as raised:
        group.pool(fail, retry=fast(1, DEAD)).run()
    assert isinstance(raised.value.__cause__, Fault)
    assert "could not be moved to the dead letters" in raised.value.__cause__.__notes__[0]
    assert [event.raw for event in group.reader()] == [large]


def test_without_dead_letters_the_pool_drains_and_run_raises(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary, workers: str
) -> None:
    written = one_key(client, 100)
    pool = group.pool(FailAt(diary, ("e00050",)), retry=fast(2), workers=workers)  # type: ignore[call-overload]
    with pytest.raises(rg.HandlerError) as raised:
        pool.run()
    error = raised.value
    assert rg.EventPointer.parse(error.facts["pointer"]).segment.startswith("shop/orders/")  # type: ignore[arg-type]
    assert error.facts["attempts"] == 2
    assert isinstance(error.__cause__, Fault)
    assert str(error.__cause__) == "cannot handle e00050"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert group.online_readers() == []
    # What came before it is processed and not repeated; it is not.
    assert diary.texts == written[:50]
    group.pool(Note(diary)).run()
    assert sorted(diary.texts) == written


def test_a_worker_process_ends_with_an_error_that_only_it_can_load(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary
) -> None:
    written = one_key(client, 100)
    with pytest.raises(rg.HandlerError, match="the handler failed on its last attempt") as raised:
        group.pool(FailForItself(diary, ("e00050",)), retry=fast(2), workers="process").run()
    assert str(raised.value.__cause__) == "FaultOfOneProcess: cannot handle e00050"
    assert diary.texts == written[:50]


def test_a_batch_that_fails_without_dead_letters_is_repeated_from_its_start(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary
) -> None:
    written = one_key(client, 10)
    with pytest.raises(rg.HandlerError):
        group.pool(handle_batch=FailAt(diary, ("e00005",)).batch).run()
    group.pool(handle_batch=Note(diary).batch).run()
    assert diary.texts == written[:5] + written


def test_the_other_workers_finish_what_they_have_in_hand_when_one_fails(
    client: rg.Client, group: rg.ReaderGroup
) -> None:
    both = threading.Barrier(2)
    finished: list[bytes] = []

    def handle(event: rg.Event[bytes]) -> None:
        both.wait(60)
        if event.segment == "shop/orders/0":
            raise Fault
        until(lambda: all(worker.stopping for worker in pool.workers))
        finished.append(event.raw)

    pool = group.pool(handle, readers=2)
    running = InThread(pool.run)
    until(lambda: sorted(map(len, group.distribution().readers.values())) == [1, 1])
    with client.writer(STREAM) as writer:
        for number in range(20):
            writer.write(b"e", routing_key=f"k{number}")
    with pytest.raises(rg.HandlerError):
        running.join()
    assert finished == [b"e"]


# ---------------------------------------------------------------------- bad input


def make(group: rg.ReaderGroup, **arguments: object) -> object:
    return group.pool(**arguments)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "either handle or handle_batch"),
        ({"handle": print, "handle_batch": print}, "either handle or handle_batch"),
        ({"handle": print, "handle_arrow": print}, "handle_arrow"),
        ({"handle_batch": print, "handle_arrow": print}, "handle_arrow"),
        ({"handle_arrow": print, "serializer": rg.JsonSerializer()}, "remove the serializer"),
        ({"handle_arrow": lambda batch: None, "workers": "process"}, "handle_batch='?ArrowHandler"),
        ({"handle_arrow": print, "columns": ["event", "x"]}, "at least one known column"),
        ({"handle_arrow": print, "columns": []}, "at least one known column"),
        ({"handle_arrow": print, "columns": "event"}, "columns must be"),
        ({"handle_batch": print, "columns": ["event"]}, "only handle_arrow gets columns"),
        ({"handle": print, "workers": "fibre"}, "'thread' or 'process'"),
        ({"handle": lambda event, connection: None}, r"as handle\(event\): .*'connection'; .*pass a sink"),
        ({"handle_batch": lambda: None}, r"called as handle_batch\(batch\)"),
        ({"handle_arrow": lambda: None}, r"called as handle_arrow\(batch\)"),
        ({"handle": lambda event: None, "sink": SINK}, r"as handle\(event, connection\): too many"),
        ({"handle": print, "readers": 0}, "readers must be an integer >= 1"),
        ({"handle": lambda event: None, "workers": "process"}, "handle='<function .*lambda"),
        ({"handle_batch": lambda batch: None, "workers": "process"}, "handle_batch='<function .*lambda"),
        ({"handle": print, "retry": rg.RetryPolicy(dead_letters=STREAM)}, "its own dead letters"),
    ],
)
def test_a_pool_that_cannot_be_right_is_refused(group: rg.ReaderGroup, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(rg.InvalidArgumentError, match=says):
        make(group, **arguments)


def test_dead_letters_need_a_stream(group: rg.ReaderGroup) -> None:
    with pytest.raises(rg.NotFoundError, match="create it first"):
        group.pool(print, retry=rg.RetryPolicy(dead_letters=DEAD))


def test_worker_processes_cannot_share_memory() -> None:
    with rg.connect("memory://") as client:
        client.streams.create(STREAM)
        group = client.groups.create("billing", streams=[STREAM])
        with pytest.raises(rg.InvalidArgumentError, match="other process"):
            group.pool(print, workers="process")


def open_pool_of_processes(url: str) -> None:
    with rg.connect(url) as client:
        client.groups.get("billing").pool(print, workers="process")


@pytest.mark.usefixtures("group")
def test_a_pool_of_processes_is_refused_where_no_process_may_be_started(url: str) -> None:
    with CLEAN.Pool(1) as processes, pytest.raises(rg.InvalidArgumentError, match="daemonic process.*daemon=False"):
        processes.apply(open_pool_of_processes, (url,))


def test_a_program_without_a_guard_is_told_what_is_missing(group: rg.ReaderGroup, url: str, diary: Diary) -> None:
    script = diary.folder / "program.py"
    script.write_text(
        f"import readergroup as rg\nrg.connect({url!r}).groups.get('billing').pool(print, workers='process').run()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 1
    assert "WorkerError" in done.stderr
    assert "if __name__ == '__main__'" in done.stderr


@pytest.mark.parametrize("way", ["-c", "-", "-m"])
def test_a_handler_that_no_new_process_can_load_is_refused(
    group: rg.ReaderGroup, url: str, tmp_path: Path, way: str
) -> None:
    program = f"""
import readergroup as rg
def handle(event): pass
if __name__ == "__main__":
    rg.connect({url!r}).groups.get("billing").pool(handle, workers="process").run()
"""
    package = tmp_path / "program"
    package.mkdir()
    (package / "__main__.py").write_text(program)
    arguments = {"-c": ["-c", program], "-": ["-"], "-m": ["-m", "program"]}[way]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=program,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "InvalidArgumentError: worker processes cannot load what a notebook" in done.stderr
    assert "put it into a module" in done.stderr


def test_a_store_that_is_away_when_a_worker_ends_ends_no_pool(
    group: rg.ReaderGroup, client: rg.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one_key(client, 3)
    handled: list[str] = []
    fetch_updates, errors = group.synchronizer.fetch_updates, [StoreUnavailableError("the store is away")]

    def away_once(**options: Any) -> rg.ReaderGroupState:
        if threading.current_thread() is threading.main_thread() and errors:
            raise errors.pop()
        return fetch_updates(**options)

    monkeypatch.setattr(group.synchronizer, "fetch_updates", away_once)
    # The worker ends before the pool hears of the end of the data.
    monkeypatch.setattr(pool_module.ReaderPool, "_on_end_of_data", lambda *_: None)
    group.pool(lambda event: handled.append(event.data.decode()), readers=1).run()
    assert handled == expected
    assert not errors
