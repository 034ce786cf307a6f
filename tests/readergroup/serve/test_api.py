"""Metrics, health and JSON of the web view."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import readergroup as rg
from readergroup.serve.application import app
from readergroup.serve.metrics import StoreMetrics
from readergroup.serve.sampler import Sampler
from readergroup.serve.watching import Watches
from readergroup.telemetry import PrometheusCollector
from synchronizer import open_store
from synchronizer.testing import FailingStore, Operation
from tests.readergroup.serve.serving import GROUP, LOCAL, STREAM, filled, viewed
from tests.waiting import PATIENCE_SECONDS, CallInThread, until


def values(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """The samples by name and labels."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.stores(round_robin=True)
def test_the_groups_are_listed_with_their_lag(store_url: str) -> None:
    with filled(store_url) as client, viewed(client) as browser:
        answer = browser.get("/groups").json()
        (group,) = answer["groups"]
        assert (group["group"], group["streams"], group["number_of_segments"]) == (GROUP, [STREAM], 4)
        assert group["lag"]["events"] == 100
        detail = browser.get(f"/groups/{GROUP}").json()
        assert [each["segment"] for each in detail["segments"]] == [f"{STREAM}/{number}" for number in range(4)]
        assert {each["is"] for each in detail["segments"]} == {"unassigned"}
        assert sum(each["events"] for each in detail["segments"]) == 100


def test_an_unknown_group_is_not_found_and_a_name_is_percent_decoded(store_url: str) -> None:
    with filled(store_url) as client, viewed(client) as browser:
        client.groups.create("a.b-c_d", streams=[STREAM])
        assert browser.get("/groups/a%2Eb%2Dc_d").json()["group"] == "a.b-c_d"
        for name in ("nope", "a%2Fb", "%2e%2e", "..%2F..%2Fetc%2Fpasswd", "%00", "%F0%9F%98%80", "a b"):
            answer = browser.get(f"/groups/{name}")
            assert answer.status_code in (404, 405), name
            assert set(answer.json()) == {"error"}


def test_addresses_with_a_newline_do_not_exist_and_a_wrong_method_is_told_the_right_ones(store_url: str) -> None:
    with filled(store_url) as client, viewed(client) as browser:
        for path in ("/%0A", "/page.js%0A", "/page.css%0a"):
            assert browser.get(path).status_code == 404, path
        answer = browser.get("/login")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_metrics_are_those_of_the_group(store_url: str) -> None:
    with filled(store_url) as client, viewed(client, sample_interval_seconds=0.05) as browser:
        group = client.groups.get(GROUP)
        answer = browser.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        found = values(answer.text)
        assert found["readergroup_store_up", ()] == 1
        assert found["readergroup_group_lag_events", (GROUP,)] == 100
        assert found["readergroup_group_lag_bytes", (GROUP,)] == group.lag().bytes
        assert found["readergroup_group_unassigned_segments", (GROUP,)] == 4
        per_segment = [
            value for (name, labels), value in found.items() if name == "readergroup_segment_lag_events" and labels
        ]
        assert (len(per_segment), sum(per_segment)) == (4, 100)
        assert ("readergroup_group_last_checkpoint_timestamp_seconds", (GROUP,)) not in found

        with group.reader("r") as reader:
            reader.read(timeout=PATIENCE_SECONDS)

            def is_owned() -> bool:
                found = values(browser.get("/metrics").text)
                return found["readergroup_group_owned_segments", (GROUP,)] == 4

            until(is_owned)
            found = values(browser.get("/metrics").text)
            assert found["readergroup_group_readers", (GROUP,)] == 1
            assert found["readergroup_group_owner_changes_total", (GROUP,)] == 4
            assert found["readergroup_group_takeovers_total", ("dead", GROUP)] == 0
            assert found["readergroup_sample_fetch_duration_seconds_count", ()] >= 1
            nightly = CallInThread(lambda: group.checkpoint("nightly", timeout=PATIENCE_SECONDS))
            outstanding = ("readergroup_group_outstanding_checkpoints", (GROUP,))
            until(lambda: values(browser.get("/metrics").text)[outstanding] == 1)
        assert isinstance(nightly.ended(), rg.Checkpoint)
        until(lambda: values(browser.get("/metrics").text)["readergroup_group_checkpoints_total", (GROUP,)] == 1)
        found = values(browser.get("/metrics").text)
        assert found[outstanding] == 0
        assert found["readergroup_group_last_checkpoint_timestamp_seconds", (GROUP,)] > 1e9


def test_readers_that_died_together_are_in_the_group_and_do_not_live(store_url: str) -> None:
    with filled(store_url) as client, viewed(client, sample_interval_seconds=0.05) as browser:

        def found(name: str) -> float:
            return values(browser.get("/metrics").text)[f"readergroup_group_{name}", (GROUP,)]

        group = client.groups.get(GROUP)
        group.coordinator._threaded = False  # nothing renews its lease, and nobody removes it
        with group.reader("r"):
            until(lambda: found("live_readers") == 1)
            group.configure(reader_timeout_seconds=1.0)
            until(lambda: found("live_readers") == 0)
            assert found("readers") == 1


def test_what_is_written_and_read_is_in_the_metrics(store_url: str) -> None:
    with filled(store_url) as client, viewed(client, sample_interval_seconds=0.05) as browser:
        client.groups.create("other", streams=[STREAM])

        def found(name: str) -> dict[tuple[str, ...], float]:
            return {
                labels: value
                for (each, labels), value in values(browser.get("/metrics").text).items()
                if each == f"readergroup_{name}_total"
            }

        assert found("stream_written_events") == {(STREAM,): 0}
        assert found("group_read_bytes") == {(GROUP,): 0, ("other",): 0}
        with client.writer(STREAM) as writer:
            for number in range(20):
                writer.write(b"order", routing_key=f"customer-{number}")
        with client.groups.get(GROUP).reader("r") as reader:
            for _ in range(120):
                assert reader.read(timeout=PATIENCE_SECONDS) is not None
            reader.commit()
            until(lambda: found("group_read_events") == {(GROUP,): 120, ("other",): 0})
            until(lambda: found("stream_written_events") == {(STREAM,): 20})
            segments = [f"{STREAM}/{number}" for number in range(4)]
            for unit in ("events", "bytes"):
                written, read = found(f"segment_written_{unit}"), found(f"segment_read_{unit}")
                assert [*written] == [(segment,) for segment in segments]
                assert sum(written.values()) == found(f"stream_written_{unit}")[STREAM,]
                of_group = {labels: value for labels, value in read.items() if labels[0] == GROUP}
                assert [*of_group] == [(GROUP, segment) for segment in segments]
                assert sum(of_group.values()) == found(f"group_read_{unit}")[GROUP,]


def test_names_in_labels_are_escaped() -> None:
    name = 'a"b\\c\nd'
    with filled("memory://", segments=1) as client:
        sampler = Sampler(client, interval_seconds=5.0, outbox=None)
        sampler.take()
        group = replace(sampler.sample.groups[GROUP], name=name)
        sample = replace(sampler.sample, groups={name: group})
        text = StoreMetrics(sampler, Watches(sampler), sample).text().decode()
    assert values(text)["readergroup_segment_lag_events", (name, f"{STREAM}/0")] == 100


def test_metrics_of_the_application_can_be_joined(store_url: str) -> None:
    registry = CollectorRegistry()
    Counter("shop_orders", "Orders.", registry=registry).inc(7)
    with filled(store_url) as client, viewed(client, registry=registry) as browser:
        registry.register(PrometheusCollector(client))
        text = browser.get("/metrics").text
        families = [family.name for family in text_string_to_metric_families(text)]
        assert sorted(families) == sorted(set(families)), "a name of both"
        found = values(text)
        assert found["readergroup_events_written_total", (STREAM,)] == 100
        assert found["shop_orders_total", ()] == 7
        assert found["readergroup_store_up", ()] == 1


def test_the_outbox_is_in_the_metrics(store_url: str, tmp_path: Any) -> None:
    import sqlite3

    with filled(store_url) as client:
        outbox = rg.Outbox(client, lambda: sqlite3.connect(tmp_path / "app.db"))
        outbox.create_table()
        with sqlite3.connect(tmp_path / "app.db") as connection:
            outbox.write(connection, STREAM, b"event")
        with viewed(client, outbox=outbox) as browser:
            assert values(browser.get("/metrics").text)["readergroup_outbox_waiting_events", ()] == 1


def test_whatever_the_database_of_an_outbox_raises_hides_nothing_else(store_url: str, tmp_path: Any) -> None:
    import sqlite3

    has_password = True

    def connect() -> sqlite3.Connection:
        if not has_password:
            raise KeyError("password")
        return sqlite3.connect(tmp_path / "app.db")

    with filled(store_url) as client:
        outbox = rg.Outbox(client, connect)
        outbox.create_table()
        has_password = False
        with viewed(client, outbox=outbox) as browser:
            found = values(browser.get("/metrics").text)
            assert found["readergroup_store_up", ()] == 1
            assert ("readergroup_outbox_waiting_events", ()) not in found
            assert browser.get(f"/groups/{GROUP}/desired-readers").status_code == 200


def test_the_desired_readers_follow_the_policy_in_the_address(store_url: str) -> None:
    with filled(store_url) as client, viewed(client) as browser:
        address = f"/groups/{GROUP}/desired-readers"
        assert 1 <= browser.get(address).json()["desired_readers"] <= 4  # by the age of the events
        assert browser.get(f"{address}?target_lag_seconds=1000").json()["desired_readers"] == 1
        query = "?max_readers=20&target_lag_seconds=0.000001&cooldown_seconds=0"
        answer = browser.get(address + query).json()
        assert answer["desired_readers"] == 4  # never more readers than segments
        assert answer["lag_events"] == 100
        for wrong in ("?max_readers=0", "?max_readers=x", "?target_lag_seconds=nan", "?cooldown_seconds=-1", "?a=b"):
            refused = browser.get(address + wrong)
            assert refused.status_code == 400, wrong
        assert browser.get(f"/groups/nope/desired-readers{query}").status_code == 404


def test_any_number_of_policies_is_remembered_in_bounded_space(store_url: str) -> None:
    with filled(store_url) as client:
        view = app(client)
        with TestClient(view, base_url=LOCAL) as browser:
            for number in range(300):
                browser.get(f"/groups/{GROUP}/desired-readers?max_readers={number + 1}")
        assert len(view._decisions._histories) == 256
        assert len(client.groups.get(GROUP)._scalers) == 0


def test_probes_and_samples_tell_of_a_store_that_is_away() -> None:
    failing_store = FailingStore(open_store("memory://"))
    with rg.Client(failing_store, timeout=0.1) as client:
        client.streams.create(STREAM)
        client.groups.create(GROUP, streams=[STREAM])
        with viewed(client, sample_interval_seconds=0.05) as browser:
            assert browser.get("/readyz").json() == {"status": "ok"}
            assert browser.get("/groups").json()["error"] is None
            failing_store.unavailable = True
            assert browser.get("/healthz").status_code == 200
            assert browser.get("/readyz").status_code == 503
            until(lambda: values(browser.get("/metrics").text)["readergroup_store_up", ()] == 0)
            found = values(browser.get("/metrics").text)
            assert ("readergroup_group_lag_events", (GROUP,)) not in found
            assert found["readergroup_sample_errors_total", ("StoreUnavailableError",)] >= 1
            assert browser.get(f"/groups/{GROUP}/desired-readers").status_code == 503
            assert browser.get("/groups").json()["groups"][0]["error"]


def test_the_log_tells_once_of_a_store_that_is_away_and_of_its_return(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "readergroup.serve")
    failing_store = FailingStore(open_store("memory://"))
    with rg.Client(failing_store, timeout=0.1) as client:
        client.groups.create(GROUP, streams=[client.streams.create(STREAM).name])
        with viewed(client, sample_interval_seconds=0.05) as browser:
            browser.get("/groups")
            failing_store.unavailable = True
            failed = ("readergroup_sample_errors_total", ("StoreUnavailableError",))
            until(lambda: values(browser.get("/metrics").text).get(failed, 0) >= 3)
            failing_store.unavailable = False
            until(lambda: values(browser.get("/metrics").text)["readergroup_store_up", ()] == 1)
    away, back = [each for each in caplog.records if each.name == "readergroup.serve.sampler"]
    assert away.levelno == logging.WARNING and "cannot read the store" in away.message
    assert back.levelno == logging.INFO and "again" in back.message


def test_a_sample_that_waits_for_the_store_tells_that_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("readergroup.serve.sampler.PATIENCE_SECONDS", 0.1)
    answers, is_away = threading.Event(), threading.Event()

    def hang(operation: Operation) -> None:
        if not answers.is_set():
            is_away.set()
            answers.wait(PATIENCE_SECONDS)

    failing_store = FailingStore(open_store("memory://"))
    with rg.Client(failing_store) as client:
        client.streams.create(STREAM)
        client.groups.create(GROUP, streams=[STREAM])
        with viewed(client, sample_interval_seconds=2.0) as browser:
            until(lambda: browser.get("/groups").json()["error"] is None)
            try:
                failing_store.before = hang
                assert is_away.wait(PATIENCE_SECONDS)
                until(lambda: values(browser.get("/metrics").text)["readergroup_store_up", ()] == 0, seconds=60)
                assert browser.get("/groups").json()["error"] == "the store does not answer"
                assert browser.get(f"/groups/{GROUP}/desired-readers").status_code == 503
            finally:
                failing_store.before = None
                answers.set()
            until(lambda: browser.get("/groups").json()["error"] is None)


def test_nobody_looks_and_the_store_is_left_alone(store_url: str) -> None:
    with filled(store_url) as client:
        sampler = Sampler(client, interval_seconds=0.01, outbox=None)
        assert sampler.samples == 0
        sampler.look()
        until(lambda: sampler.samples >= 2)
        sampler._looked_at = float("-inf")  # as if nobody had looked for minutes
        until(lambda: sampler._keeper._thread is None or not sampler._keeper._thread.is_alive())
        taken = sampler.samples
        sampler.look()
        until(lambda: sampler.samples > taken)
        sampler.close()


def test_many_requests_share_one_sample(store_url: str) -> None:
    with filled(store_url) as client:
        view = app(client, sample_interval_seconds=60)
        with TestClient(view, base_url=LOCAL) as browser:
            for _ in range(50):
                browser.get("/metrics")
                browser.get("/groups")
                browser.get(f"/groups/{GROUP}")
        assert view._sampler.samples == 1


def test_a_deleted_group_leaves_the_metrics(store_url: str) -> None:
    with filled(store_url) as client, viewed(client, sample_interval_seconds=0.05) as browser:
        assert (("readergroup_group_lag_events", (GROUP,))) in values(browser.get("/metrics").text)
        client.groups.delete(GROUP)
        until(lambda: ("readergroup_group_lag_events", (GROUP,)) not in values(browser.get("/metrics").text))
        assert browser.get(f"/groups/{GROUP}").status_code == 404


def test_beyond_its_limit_a_large_group_has_totals_only(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("readergroup.serve.metrics.MAX_SEGMENTS", 5)
    with filled(store_url, segments=6) as client, viewed(client) as browser:
        client.streams.create("shop/small")
        client.groups.create("small", streams=["shop/small"])
        found = values(browser.get("/metrics").text)
        assert found["readergroup_segments_left_out", ()] == 6
        assert found["readergroup_segment_lag_events", ("small", "shop/small/0")] == 0
        assert ("readergroup_segment_lag_events", (GROUP, f"{STREAM}/0")) not in found
        assert found["readergroup_group_lag_events", (GROUP,)] == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"token": "short"},
        {"token": "with a newline\nin the middle"},
        {"token": 5},
        {"allow_writes": "yes"},
        {"sample_interval_seconds": 0},
        {"sample_interval_seconds": float("nan")},
        {"sample_interval_seconds": True},
        {"hosts": "localhost"},
        {"hosts": b"localhost"},
        {"hosts": ["localhost", 5]},
        {"registry": object()},
        {"outbox": object()},
    ],
)
def test_wrong_arguments_are_refused(store_url: str, wrong: dict[str, Any]) -> None:
    with rg.connect(store_url) as client:
        with pytest.raises(rg.InvalidArgumentError):
            app(client, **wrong)
    with pytest.raises(rg.InvalidArgumentError):
        app("memory://")  # type: ignore[arg-type]


def test_json_is_json(store_url: str) -> None:
    """No NaN and no infinity, which JSON does not have."""
    with filled(store_url) as client, viewed(client) as browser:
        client.groups.create("other", streams=[STREAM], max_processing_seconds=None)
        text = browser.get("/groups/other").text
        json.loads(text, parse_constant=lambda name: pytest.fail(name))


def test_a_group_that_cannot_be_read_hides_no_other_one(store_url: str) -> None:
    with filled(store_url) as client, viewed(client) as browser:
        client.store.create("group/damaged")
        client.store.append("group/damaged", b"no entry")
        answer = browser.get("/groups").json()
        assert answer["error"] is None
        assert [each["group"] for each in answer["groups"]] == [GROUP]
        assert [each["group"] for each in answer["unreadable"]] == ["damaged"]
        refused = browser.get("/groups/damaged")
        assert (refused.status_code, "cannot be read" in refused.json()["error"]) == (500, True)
        found = values(browser.get("/metrics").text)
        assert (found["readergroup_store_up", ()], found["readergroup_unreadable_groups", ()]) == (1, 1)


def test_a_group_whose_stream_was_created_again_is_unreadable(store_url: str) -> None:
    with filled(store_url) as client:
        with viewed(client, sample_interval_seconds=0.1) as browser:
            assert browser.get(f"/groups/{GROUP}/desired-readers?max_readers=4").status_code == 200
            client.streams.delete(STREAM)
            client.streams.create(STREAM)
            until(lambda: browser.get("/groups").json()["unreadable"])
            assert_unreadable(browser)
        with viewed(client) as browser:  # it has never read the group
            assert_unreadable(browser)


def assert_unreadable(browser: TestClient) -> None:
    (found,) = browser.get("/groups").json()["unreadable"]
    assert found["group"] == GROUP and "created again" in found["error"]
    answer = browser.get(f"/groups/{GROUP}/desired-readers?max_readers=4")
    assert answer.status_code >= 500 and "created again" in answer.json()["error"]
    text = browser.get("/metrics").text
    assert values(text)["readergroup_unreadable_groups", ()] == 1
    assert "readergroup_group_lag_events{" not in text


def test_in_a_forked_worker_the_view_says_what_to_do(store_url: str) -> None:
    with filled(store_url) as client:
        view = app(client)
        view._sampler._process_id = 0
        answer = TestClient(view, base_url=LOCAL).get("/groups")
        assert answer.status_code == 503 and "in each worker" in answer.json()["error"]
