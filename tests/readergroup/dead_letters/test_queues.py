"""The dead letters of a queue are listed, replayed once and discarded, wherever a process that replays them dies."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

import readergroup as rg
from readergroup.dead_letters.queues import QueueDeadLetters
from synchronizer import SegmentStore, open_store
from synchronizer.recipes.queue import dead_letters
from synchronizer.testing import FailingStore, InstantClock, Operation
from tests.command import app
from tests.dying import Died, dying_after

QUEUE = "shop/mail"


@pytest.fixture
def client(store_url: str) -> Iterator[rg.Client]:
    with rg.connect(store_url) as client:
        yield client


def set_up(client: rg.Client, count: int = 6) -> None:
    """Set all events of the queue aside; leave it empty."""

    def fail(event: rg.QueuedEvent) -> None:
        raise (ValueError("odd") if int(event.data) % 2 else KeyError("even"))

    retries = rg.Retries(attempts=2, first_delay_seconds=0)
    with client.event_processor(QUEUE, fail, retries=retries, set_aside=True) as processor:
        processor.add_many([b"%d" % number for number in range(count)])
        processor.drain(timeout=60)


def queued(client: rg.Client) -> list[bytes]:
    """Handle what the queue has."""
    found: list[bytes] = []
    with client.event_processor(QUEUE, lambda event: found.append(event.data)) as processor:
        processor.drain(timeout=60)
    return found


def numbers(letters: Iterator[rg.StoredDeadLetter]) -> list[int]:
    return [int(each.letter.data) for each in letters]


@pytest.mark.stores
def test_letters_of_a_queue_are_listed_replayed_and_discarded(client: rg.Client) -> None:
    set_up(client)
    letters = client.dead_letters(queue=QUEUE)
    found = list(letters.list())
    assert numbers(iter(found)) == list(range(6))
    assert found[1].stream == QUEUE and found[1].letter.error == "ValueError: odd" and found[1].letter.attempts == 2
    assert abs(found[1].written_at - datetime.now(UTC)) < timedelta(hours=1)
    assert letters.show(str(found[1].pointer)) == letters.show(str(found[1].pointer.offset)) == found[1]
    assert numbers(letters.list(error="KeyError")) == [0, 2, 4]
    assert not list(letters.list(until=datetime(2020, 1, 1, tzinfo=UTC))) and not list(letters.list(routing_key="ann"))

    assert letters.replay(error="ValueError", limit=2) == 2
    assert letters.discard(found[0].pointer) == 1 and letters.discard(found[0].pointer) == 0
    with pytest.raises(rg.InvalidArgumentError, match="was discarded"):
        letters.replay(found[0].pointer)
    assert numbers(letters.list(status="replayed")) == [1, 3]
    assert letters.replay() == 3 and letters.replay() == 0 and letters.discard() == 0
    assert queued(client) == [b"1", b"3", b"2", b"4", b"5"]
    assert letters.show(found[0].pointer).status == "discarded"

    queue = client.event_queue(QUEUE)
    queue.forget_dead_letters([*queue.dead_letters()][2])
    assert numbers(letters.list(status=None)) == [3, 4, 5]
    with pytest.raises(rg.NotFoundError):
        letters.show(found[0].pointer)
    with pytest.raises(rg.NotFoundError):
        letters.show(found[3].pointer._replace(offset=found[3].pointer.offset + 1))
    with pytest.raises(rg.NotFoundError):
        letters.show(found[3].pointer._replace(offset=10**6))


def test_what_is_wrong_is_refused_and_creates_nothing(client: rg.Client) -> None:
    names = set(client.store.list(""))
    with pytest.raises(rg.NotFoundError, match="no queue"):
        client.dead_letters(queue="typo").list()
    with pytest.raises(rg.NotFoundError, match="no queue"):
        client.dead_letters(queue="typo").replay()
    for arguments in ({}, {"stream": "a/b", "queue": "c"}):
        with pytest.raises(rg.InvalidArgumentError, match="either"):
            client.dead_letters(**arguments)
    with pytest.raises(rg.InvalidArgumentError, match="name"):
        client.dead_letters(queue="not a name")
    with pytest.raises(rg.NotFoundError, match="no queue"):
        client.dead_letters(queue=QUEUE).show("shop/dead/0:0:0")
    assert set(client.store.list("")) == names


def test_a_queue_without_dead_letters_has_none(client: rg.Client) -> None:
    client.event_queue(QUEUE)
    assert not list(client.dead_letters(queue=QUEUE).list())
    assert client.dead_letters(queue=QUEUE).replay() == 0


@pytest.mark.parametrize("fails", ["before", "after"])
def test_each_event_is_added_once_wherever_the_process_dies(fails: str) -> None:
    step = 0
    while _replay_and_die(step, fails):
        step += 1
    assert step >= 4, "it never died while it replayed"


def _replay_and_die(step: int, fails: str) -> bool:
    store: SegmentStore = open_store(f"memory://{random.random()}")
    with rg.Client(store) as client:
        set_up(client)
        failing = FailingStore(store)
        setattr(failing, fails, dying_after(step))
        has_died = False
        try:
            QueueDeadLetters(QUEUE, failing, client.clock, 30).replay(limit=4)
        except Died:
            has_died = True
        assert client.dead_letters(queue=QUEUE).replay() >= 2
        assert sorted(queued(client)) == [b"%d" % number for number in range(6)]
        return has_died


def test_a_lost_answer_adds_each_event_once_and_counts_it() -> None:
    store: SegmentStore = open_store(f"memory://{random.random()}")
    with rg.Client(store) as client:
        set_up(client)
        failing = FailingStore(store)
        lost = 0

        def lose(operation: Operation) -> None:
            nonlocal lost
            if operation.verb == "append" and not lost:
                lost += 1
                raise rg.StoreUnavailableError("the answer is lost")

        failing.after = lose
        assert QueueDeadLetters(QUEUE, failing, client.clock, 30).replay() == 6 and lost
        assert len(queued(client)) == 6


@pytest.mark.parametrize("what", ["replay", "discard"])
def test_a_call_ends_at_its_timeout_wherever_the_store_goes_away(what: str) -> None:
    step = 0
    while (waited := _seconds_until_the_error(what, step)) is not None:
        assert waited <= 2, step
        step += 1
    assert step > 5


def _seconds_until_the_error(what: str, step: int) -> float | None:
    """Let the store go away at this call; return how long the call with a timeout of 2 s waited, None: not at all."""
    store: SegmentStore = open_store(f"memory://{random.random()}")
    with rg.Client(store) as client:
        set_up(client)
    failing = FailingStore(store)
    left = step

    def go_away(operation: Operation) -> None:
        nonlocal left
        left -= 1
        failing.unavailable = left < 0

    failing.before = go_away
    clock = InstantClock()
    letters = QueueDeadLetters(QUEUE, failing, clock, 30)
    begun = clock.monotonic()
    try:
        if what == "replay":
            letters.replay(timeout=2)
        else:
            letters.discard(timeout=2)
    except rg.StoreUnavailableError:
        return clock.monotonic() - begun
    return None


def test_two_processes_that_replay_at_once_add_each_event_once() -> None:
    store: SegmentStore = open_store(f"memory://{random.random()}")
    with rg.Client(store) as client:
        set_up(client)
        failing = FailingStore(store)
        done: list[int] = []

        def replay_first(operation: Operation) -> None:
            if operation.verb == "append" and not done:
                done.append(client.dead_letters(queue=QUEUE).replay(limit=3))

        failing.before = replay_first
        assert QueueDeadLetters(QUEUE, failing, client.clock, 30).replay() == 3 and done == [3]
        assert len(queued(client)) == 6


def test_letters_that_another_process_replays_and_forgets_meanwhile_are_not_added_again() -> None:
    store: SegmentStore = open_store(f"memory://{random.random()}")
    with rg.Client(store) as client:
        set_up(client)
        failing = FailingStore(store)
        handled: list[bytes] = []

        def replay_and_forget(operation: Operation) -> None:
            if operation.verb != "append" or handled:
                return
            letters, queue = client.dead_letters(queue=QUEUE), client.event_queue(QUEUE)
            assert letters.replay() == 6
            handled.extend(queued(client))
            queue.forget_dead_letters([*queue.dead_letters()][-1])
            set_up(client, 1)
            assert letters.replay() == 1  # which drops the marks of the forgotten letters

        failing.before = replay_and_forget
        assert QueueDeadLetters(QUEUE, failing, client.clock, 30).replay() == 0
        assert len(handled) == 6 and queued(client) == [b"0"]


def test_letters_that_are_done_here_and_there_end_with_an_error(
    client: rg.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MAX_DONE_SPANS", 2)
    set_up(client, 10)
    letters = client.dead_letters(queue=QUEUE)
    assert letters.discard(*[each.pointer for each in letters.list(error="KeyError", limit=2)]) == 2
    with pytest.raises(rg.UnsupportedError, match="forget"):
        letters.discard(error="KeyError")
    queue = client.event_queue(QUEUE)
    queue.forget_dead_letters([*queue.dead_letters()][6])
    assert letters.discard(error="KeyError") == 1


def test_the_command_takes_a_queue(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    with rg.connect(url) as client:
        set_up(client, 3)

    def run(*words: str) -> str:
        result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["--url", url, "dead-letters", *words, "--queue"])
        assert result.exit_code == 0, result.stderr
        return result.stdout

    shown = run("list", QUEUE)
    assert "ValueError: odd" in shown and "3 pending" in shown
    first = json.loads(run("list", QUEUE, "--json").splitlines()[0])
    assert first["letter"] == f"dead-letters/{QUEUE}:queue:0" and first["stream"] == QUEUE and first["data"] == "0"
    assert "error: KeyError" in run("show", QUEUE, "0")
    assert "1 dead letter discarded" in run("discard", QUEUE, "0", "--yes")
    assert "1 dead letter replayed" in run("replay", QUEUE, "--error", "ValueError", "--yes")
    assert "1 pending, 1 replayed, 1 discarded" in run("list", QUEUE)


def test_a_queue_takes_no_retry_policy_whose_dead_letters_it_would_ignore(client: rg.Client) -> None:
    policy = rg.RetryPolicy(attempts=1, dead_letters="shop/dead")
    with pytest.raises(rg.InvalidArgumentError, match="set_aside=True") as raised:
        client.event_processor("shop/other-mail", print, retries=policy)
    assert raised.value.facts["unknown"] == ["dead_letters"]
    client.event_processor("shop/other-mail", print, retries=rg.RetryPolicy(attempts=1)).close()
