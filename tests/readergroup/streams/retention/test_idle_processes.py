"""Policies are applied by a process that only has the store open."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import readergroup as rg
from readergroup.streams import maintenance
from synchronizer.testing import ManualClock
from tests.waiting import PATIENCE_SECONDS, until

STREAM = "shop/orders"
OPEN = """
import sys, readergroup as rg
with rg.connect(sys.argv[1], must_exist=True) as client:
    print(list(client.streams.list()), flush=True)
    sys.stdin.readline()
"""


def policy_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.endswith(" policies")]


@pytest.fixture(autouse=True)
def no_thread_of_another_test_is_left() -> None:
    gc.collect()
    until(lambda: not policy_threads(), "the threads of other tests end")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A stream that has more than its policy allows, because the process that set the policy is gone."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    with rg.connect(url, clock=ManualClock()) as client:
        client.streams.create(STREAM)
        with client.writer(STREAM) as writer:
            for _ in range(100):
                writer.write(b"x" * 1000)
                writer.flush()
        client.streams.configure(STREAM, retention=rg.RetentionPolicy(max_bytes=50_000))
    return url


def start_of(looking: rg.Client) -> int:
    return next(iter(looking.streams.info(STREAM).head.offsets.values()))


def test_another_process_that_only_has_the_store_open_trims_a_stream_that_nobody_uses(url: str) -> None:
    command = [sys.executable, "-c", OPEN, url]
    with rg.connect(url, clock=ManualClock()) as looking:  # which applies nothing itself
        assert start_of(looking) == 0
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            assert STREAM in process.stdout.readline().decode()
            until(lambda: start_of(looking) > 0, "the stream is trimmed")
            process.stdin.close()
            assert process.wait(PATIENCE_SECONDS) == 0


def test_a_client_that_only_has_a_group_open_trims_a_stream_that_nobody_uses(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "FIRST_LOOK_SECONDS", 0.05)
    with rg.connect(url, clock=ManualClock()) as looking:
        looking.streams.create("shop/other")
        looking.groups.create("billing", streams=["shop/other"])
        with rg.connect(url) as client:
            assert list(client.groups.list()) == ["billing"]
            with pytest.raises(rg.NotFoundError):
                client.groups.get("missing")
            assert policy_threads() == []
            assert client.groups.get("billing").name == "billing"
            assert len(policy_threads()) == 1
            until(lambda: start_of(looking) > 0, "the stream is trimmed")
    until(lambda: not policy_threads(), "the thread ends")


def test_closing_ends_the_thread_at_once_and_so_does_forgetting_the_client(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "FIRST_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(maintenance, "INTERVAL_SECONDS", 2 * PATIENCE_SECONDS)  # it is not waited for
    with rg.connect(url) as client:
        assert policy_threads() == []
        assert client.streams is not None
        assert len(policy_threads()) == 1
        until(lambda: start_of(client) > 0, "the stream is trimmed")
    until(lambda: not policy_threads(), "the thread ends")

    monkeypatch.setattr(maintenance, "FIRST_LOOK_SECONDS", 2 * PATIENCE_SECONDS)
    forgotten = rg.connect(url)
    assert forgotten.streams is not None
    store = forgotten.store
    del forgotten
    gc.collect()
    until(lambda: not policy_threads(), "the thread ends")
    store.close()


def test_nothing_runs_for_a_store_of_one_process_a_borrowed_store_or_a_manual_clock(url: str) -> None:
    with rg.connect("memory://") as one, rg.connect(url, clock=ManualClock()) as manual, rg.Client(one.store) as own:
        for client in (one, manual, own):
            assert client.streams is not None and client.groups is not None
        assert policy_threads() == []


def test_a_system_without_threads_leaves_it_to_others(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with rg.connect(url) as client:
        assert list(client.streams.list()) == [STREAM]
