"""Dead letters in the web view: they are found, counted, listed by pages, replayed and discarded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

import readergroup as rg
from readergroup.serve import letters as serve_letters
from readergroup.serve.letters import LetterStreams
from readergroup.serve.sampler import Sampler
from synchronizer import SystemClock, open_store
from synchronizer.testing import FailingStore
from tests.readergroup.serve.serving import GROUP, STREAM, TOKEN, bearer, filled, set_aside, viewed
from tests.readergroup.serve.test_api import values
from tests.waiting import until

DEAD = "shop/orders-dead"


@pytest.fixture
def client(store_url: str) -> Iterator[rg.Client]:
    with filled(store_url) as client:
        yield client


def page(browser: TestClient, **wanted: str) -> Any:
    answer = browser.get("/dead-letters", params={"stream": DEAD, **wanted})
    assert answer.status_code == 200, answer.text
    return answer.json()


def post(browser: TestClient, change: str, **body: Any) -> Any:
    headers = {"x-readergroup-csrf": browser.get("/session").json()["csrf"]}
    return browser.post(f"/dead-letters/{change}", json={"stream": DEAD, **body}, headers=headers)


@pytest.mark.stores(round_robin=True)
def test_streams_with_dead_letters_are_found_and_counted(store_url: str) -> None:
    with filled(store_url) as client:
        client.streams.create("shop/empty")
        set_aside(client, DEAD, 7)
        with viewed(client, sample_interval_seconds=0.05) as browser:
            found = browser.get("/groups").json()["dead_letters"]
            assert found == [{"stream": DEAD, "pending": 7, "is_partial": False}]
            client.dead_letters(DEAD).discard(limit=2)
            until(lambda: browser.get("/groups").json()["dead_letters"][0]["pending"] == 5)
            set_aside(client, DEAD, 3)
            until(lambda: browser.get("/groups").json()["dead_letters"][0]["pending"] == 8)
            client.dead_letters(DEAD).replay()
            until(lambda: browser.get("/groups").json()["dead_letters"][0]["pending"] == 0)
            client.streams.delete(DEAD)
            until(lambda: not browser.get("/groups").json()["dead_letters"])


class SlowClock(SystemClock):
    """That of a machine that is a day behind."""

    def time(self) -> float:
        return super().time() - 86_400


def test_letters_of_a_client_whose_clock_is_behind_are_counted(client: rg.Client) -> None:
    counting = LetterStreams(client)
    letters = client.dead_letters(DEAD)
    behind = rg.Client(client.store, clock=SlowClock())
    for writer, written, discarded in ((client, 4, 0), (behind, 3, 0), (client, 0, 5), (behind, 2, 1), (client, 1, 0)):
        set_aside(writer, DEAD, written)
        letters.discard(limit=discarded)
        counting.find()
        assert counting.count()[DEAD].pending == len(list(letters.list()))
    behind.close()


def test_without_dead_letters_a_sample_costs_nothing_more() -> None:
    store = FailingStore(open_store("memory://"))
    with rg.Client(store) as client:
        client.streams.create(STREAM)
        client.groups.create(GROUP, streams=[STREAM])
        with client.writer(STREAM) as writer:
            writer.write(b"no letter")
        sampler = Sampler(client, interval_seconds=5, outbox=None)
        sampler.take()
        sampler.take()

        def calls() -> int:
            before = len(store.operations)
            sampler.take()
            return len(store.operations) - before

        alone = calls()
        set_aside(client, DEAD, 3)
        assert calls() == alone  # nothing looks for it before 30 s are over
        sampler.letters.find()
        assert calls() > alone


def test_each_stream_is_opened_once_and_an_empty_one_again(client: rg.Client) -> None:
    opened: list[str] = []

    streams = serve_letters.LetterStreams(client)
    of = client.dead_letters
    client.dead_letters = lambda stream: opened.append(stream) or of(stream)  # type: ignore[method-assign, func-returns-value]
    client.streams.create("shop/empty")
    streams.find()
    assert sorted(opened) == ["shop/empty", STREAM]
    streams._again_at = {name: at - 31 for name, at in streams._again_at.items()}  # half a minute later
    streams.find()
    assert opened[2:] == ["shop/empty"]
    assert streams.count() == {}


def test_pages_are_the_newest_first_and_miss_none(client: rg.Client) -> None:
    set_aside(client, DEAD, 60)
    with viewed(client) as browser:
        seen: list[str] = []
        times: list[float] = []
        wanted: dict[str, str] = {}
        sizes = []
        while True:
            found = page(browser, **wanted)
            sizes.append(len(found["letters"]))
            seen += [each["letter"] for each in found["letters"]]
            times += [each["at"] for each in found["letters"]]
            if found["older"] is None:
                break
            wanted = {"older": found["older"]}
        assert sizes == [25, 25, 10]
        assert sorted(seen) == sorted(str(each.pointer) for each in client.dead_letters(DEAD).list())
        assert times == sorted(times, reverse=True)


def test_filters_select_and_long_texts_are_cut(client: rg.Client) -> None:
    set_aside(client, DEAD, 4)
    with client.writer(DEAD, serializer=rg.PydanticSerializer(rg.DeadLetter)) as writer:
        pointer = next(client.dead_letters(DEAD).list()).letter.pointer
        for data in ("ä" * 9_000, "x" * 3_999 + "ä" * 9):
            writer.write(
                rg.DeadLetter(data=data.encode(), pointer=pointer, error="E" * 90_000, attempts=1),
                "k" * 1_000,
                {"trace": b"\xff" * 1_000},
            )
        writer.write(rg.DeadLetter(data=b"\xff\xfe", pointer=pointer, error="binary", attempts=1), "bytes")
    with viewed(client) as browser:
        assert {each["error"] for each in page(browser, error="odd")["letters"]} == {"ValueError: odd"}
        (binary,) = page(browser, key="bytes")["letters"]
        assert (binary["data"], binary["is_text"], binary["bytes"]) == ("//4=", False, 2)
        answer = browser.get("/dead-letters", params={"stream": DEAD, "key": "k" * 1_000})
        assert len(answer.content) < 20_000
        assert {each["data"] for each in answer.json()["letters"]} == {"ä" * 2_000, "x" * 3_999}
        assert page(browser, status="replayed")["letters"] == []
        assert len(page(browser, status="all")["letters"]) == 7


def test_letters_are_replayed_and_discarded_by_their_pointers_and_by_filters(client: rg.Client) -> None:
    set_aside(client, DEAD, 10)
    before = client.groups.get(GROUP).lag().events
    with viewed(client, allow_writes=True) as browser:
        first, second, *_ = (each["letter"] for each in page(browser)["letters"])
        assert post(browser, "replay", letters=[first]).json() == {"done": "replayed 1 dead letter"}
        assert post(browser, "replay", letters=[first]).json() == {"done": "replayed 0 dead letters"}
        assert post(browser, "discard", letters=[second]).json() == {"done": "discarded 1 dead letter"}
        assert post(browser, "replay", letters=[second]).status_code == 400
        left = len(page(browser, error="odd")["letters"])
        assert post(browser, "discard", error="odd").json() == {"done": f"discarded {left} dead letters"}
        rest = len(page(browser)["letters"])
        assert post(browser, "replay").json() == {"done": f"replayed {rest} dead letters"}
        assert page(browser)["letters"] == []
        assert client.groups.get(GROUP).lag().events == before + 1 + rest


def test_what_is_wrong_is_refused_and_changes_nothing(client: rg.Client) -> None:
    set_aside(client, DEAD, 3)
    with viewed(client, allow_writes=True) as browser:
        (pointer, *_) = (each["letter"] for each in page(browser)["letters"])
        for body in (
            {"letters": []},
            {"letters": [pointer] * 101},
            {"letters": [pointer], "error": "x"},
            {"letters": "all"},
            {"letters": ["0:-1"]},
            {"error": 5},
            {"stream": 5},
            {"stream": "nope"},
            {"extra": 1},
        ):
            for change in ("replay", "discard"):
                assert post(browser, change, **body).status_code == 400, body
        assert post(browser, "replay", stream="shop/nope").status_code == 404
        assert post(browser, "replay", letters=[pointer.replace("dead", "other")]).status_code == 404
        assert post(browser, "purge").status_code == 404
        assert len(page(browser)["letters"]) == 3
        for wanted in (
            {"status": "lost"},
            {"older": "x"},
            {"older": "1~2"},
            {"older": f"{'9' * 40}~1~1"},
            {"older": "nan~1~1"},
            {"limit": "5"},
            {"stream": STREAM},
            {"stream": "nope"},
            {"stream": "a/\0"},
        ):
            assert browser.get("/dead-letters", params={"stream": DEAD, **wanted}).status_code == 400, wanted
        assert browser.get("/dead-letters").status_code == 400
        assert browser.get(f"/dead-letters?stream={DEAD}&stream={DEAD}").status_code == 400
        assert browser.get("/dead-letters?stream=shop/nope").status_code == 404
        client.streams.seal(STREAM)
        assert post(browser, "replay").status_code == 409
        assert len(page(browser)["letters"]) == 3


def test_letters_need_the_token_and_changes_the_text_of_the_page(client: rg.Client) -> None:
    set_aside(client, DEAD, 1)
    with viewed(client, token=TOKEN, allow_writes=True) as browser:
        assert browser.get(f"/dead-letters?stream={DEAD}").status_code == 401
        assert browser.post("/dead-letters/replay", json={"stream": DEAD}).status_code == 401
        assert browser.post("/login", json={"token": TOKEN}).status_code == 204
        for change in ("replay", "discard"):
            assert browser.post(f"/dead-letters/{change}", json={"stream": DEAD}).status_code == 403
            headers = {"x-readergroup-csrf": browser.get("/session").json()["csrf"], "origin": "https://evil.example"}
            assert browser.post(f"/dead-letters/{change}", json={"stream": DEAD}, headers=headers).status_code == 403
    with viewed(client, token=TOKEN) as browser:
        answer = browser.post("/dead-letters/discard", json={"stream": DEAD}, headers=bearer())
        assert answer.status_code == 403 and "--allow-writes" in answer.json()["error"]
    assert [each.status for each in client.dead_letters(DEAD).list(status=None)] == ["pending"]


def test_the_pending_letters_of_each_group_are_in_the_metrics(client: rg.Client) -> None:
    client.streams.create("shop/other")
    client.groups.create("elsewhere", streams=["shop/other"])
    name = "readergroup_group_pending_dead_letters"
    with viewed(client, sample_interval_seconds=0.05) as browser:
        found = values(browser.get("/metrics").text)
        assert (found[name, (GROUP,)], found[name, ("elsewhere",)]) == (0, 0)
    set_aside(client, DEAD, 6)
    set_aside(client, "shop/more-dead", 3)
    with viewed(client, sample_interval_seconds=0.05) as browser:
        found = values(browser.get("/metrics").text)
        assert (found[name, (GROUP,)], found[name, ("elsewhere",)]) == (9, 0)
        client.dead_letters(DEAD).discard()
        until(lambda: values(browser.get("/metrics").text)[name, (GROUP,)] == 3)


def test_many_pending_letters_are_counted_in_part(client: rg.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_letters, "MAX_COUNTED", 5)
    set_aside(client, DEAD, 9)
    with viewed(client) as browser:
        found = browser.get("/groups").json()["dead_letters"]
        assert found == [{"stream": DEAD, "pending": 5, "is_partial": True}]
