"""Shared states in the web view: their values and updates."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from synchronizer import Revision, State, Update
from tests.readergroup.serve.serving import GROUP, STREAM, TOKEN, filled, viewed


class Visits(State):
    count: int = 0


class Visit(Update[Visits], tag="visit"):
    page: str

    def apply_to(self, state: Visits, revision: Revision) -> Visits:
        return state.replace(count=state.count + 1)


def shown(browser: TestClient, name: str, **wanted: str) -> Any:
    answer = browser.get("/states", params={"name": name, **wanted})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.stores(round_robin=True)
def test_a_state_shows_its_value_and_who_changed_it(store_url: str) -> None:
    with filled(store_url) as client, viewed(client) as browser:
        prices = client.shared_map("prices", int)
        prices["tea"] = 3
        prices["tea"] = 4
        listed = {each["name"]: each for each in browser.get("/groups").json()["states"]}
        assert listed["map/prices"]["has_updates"]
        found = shown(browser, "map/prices")
        assert found["type"] == "MapState"
        assert "tea" in "".join(found["fields"].values()) and "4" in "".join(found["fields"].values())
        newest, older, first = found["updates"]
        assert "4" in newest["fields"] and "3" in older["fields"]
        assert newest["writer"] == older["writer"] and len(newest["writer"]) == 16
        assert Revision.parse(newest["revision"]) > Revision.parse(older["revision"])
        assert first["update"] == "(initial state)"
        assert shown(browser, "map/prices", known=found["known"]) == {"name": "map/prices", "is_unchanged": True}
        prices["tea"] = 5
        assert len(shown(browser, "map/prices", known=found["known"])["updates"]) == 4


def test_a_state_of_an_application_shows_its_last_snapshot(store_url: str) -> None:
    with filled(store_url) as client, viewed(client) as browser:
        visits = client.synchronizer("visits", initial=Visits(), updates=[Visit])
        for number in range(3):
            visits.update_state_unconditionally(Visit(page=f"<b>{number}</b>"))
        found = shown(browser, "state/visits")
        assert (found["fields"], found["entries_since"]) == ({"count": "0"}, 3)
        assert [each["fields"] for each in found["updates"][:3]] == [f"page=<b>{n}</b>" for n in (2, 1, 0)]


def test_only_the_last_updates_and_the_beginnings_of_long_values_are_sent(store_url: str) -> None:
    with filled(store_url) as client, viewed(client) as browser:
        prices = client.shared_map("prices", str)
        for number in range(30):
            prices[str(number)] = "x" * 5_000
        answer = browser.get("/states?name=map/prices")
        assert len(answer.json()["updates"]) == 20
        assert answer.json()["earlier"] == 11
        assert len(answer.content) < 30_000
        assert len(shown(browser, "map/prices", limit="200")["updates"]) == 31


def test_groups_streams_and_locks_have_a_history_too(store_url: str) -> None:
    with filled(store_url) as client, viewed(client) as browser:
        with client.lock("nightly"):
            assert shown(browser, "lock/nightly")["type"] == "Members"
        assert shown(browser, f"group/{GROUP}")["type"] == "ReaderGroupState"
        assert shown(browser, f"stream/{STREAM}")["type"] == "StreamState"


def test_what_is_no_state_is_refused(store_url: str) -> None:
    with filled(store_url) as client, viewed(client) as browser:
        for name in ("data/x", f"{STREAM}/0", "", "../etc/passwd", "queue/x", "map"):
            assert browser.get("/states", params={"name": name}).status_code in (400, 404), name
        assert browser.get("/states?name=map/nope").status_code == 404
        for wrong in ("0", "201", "-1", "1e9", "x", "٣", "9" * 5_000):
            assert browser.get("/states", params={"name": f"group/{GROUP}", "limit": wrong}).status_code in (400, 414)
        assert browser.get("/states").status_code == 400
        assert browser.get("/states?name=map/x&all=1").status_code == 400
    with filled(store_url) as client, viewed(client, token=TOKEN) as browser:
        assert browser.get("/states?name=map/prices").status_code == 401
