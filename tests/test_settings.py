"""The tables of docs/settings.md: every setting of a group with its default, and the limits."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

import readergroup as rg
from readergroup.scaling import worker
from readergroup.streams.config import MAX_NAME_LENGTH, MAX_SCALED_SEGMENTS, MAX_SEGMENTS
from readergroup.streams.data.block import MAX_EVENT_BYTES
from readergroup.streams.data.write_batch import MAX_KEY_LENGTH, MAX_UNSTORED_BYTES
from readergroup.streams.transactions.transaction import STAGING_RETENTION_SECONDS
from synchronizer import MAX_APPEND_BYTES
from synchronizer.limits import DEFAULT_STATE_LIMIT_BYTES
from synchronizer.recipes.queue.dead_letters import ENVELOPE_BYTES
from synchronizer.store import MAX_ATTRIBUTE_CHANGES
from synchronizer.stores.sqlite.extents import MAX_SEGMENT_BYTES
from synchronizer.stores.sqlite.rows import MAX_SEGMENTS as MAX_SEGMENTS_OF_A_FILE
from tests.places import DOCS

PAGE = (DOCS / "settings.md").read_text()
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| (.*?) \| .* \| (yes|no) \|$", PAGE, re.MULTILINE)}
DEFAULTS: dict[str, Any] = {
    name: field.default
    for name, field in rg.ReaderGroupConfig.model_fields.items()
    if name not in ("streams", "start", "end")
}
OTHER: dict[str, Any] = {
    "reader_timeout_seconds": 5.0,
    "refresh_interval_seconds": 2.0,
    "position_interval_seconds": 2.0,
    "max_processing_seconds": None,
    "automatic_checkpoint_interval_seconds": None,
    "max_outstanding_checkpoints": 2,
    "retention": "AT_LAST_COMMIT",
    "balance": "load",
}


def test_the_table_has_every_setting_with_its_default() -> None:
    assert ROWS.keys() == rg.ReaderGroupConfig.model_fields.keys()
    assert {name: _value(ROWS[name][0]) for name in DEFAULTS} == DEFAULTS


def _value(cell: str) -> object:
    return cell.strip('`"') if cell.startswith("`") else float(cell)


def test_what_the_table_says_to_change_can_be_changed(store_url: str) -> None:
    assert {name for name, (_, changes) in ROWS.items() if changes == "yes"} == OTHER.keys() | {
        "streams",
        "start",
        "end",
    }
    with rg.connect(store_url) as client:
        client.streams.create("shop/orders")
        client.streams.create("shop/returns")
        group = client.groups.create("billing", streams=["shop/orders"])
        for name, value in OTHER.items():
            changed = getattr(group.configure(**{name: value}), name)
            assert changed == (math.inf if value is None else value)
        group.configure(streams=["shop/returns"], start="tail", end={})
        with pytest.raises(rg.ReaderGroupExistsError):
            client.groups.create("billing", streams=["shop/orders"])


def test_the_limits_are_those_of_the_code() -> None:
    limits = dict(re.findall(r"^\| (\w[^|]*) \| ([^|]*) \|", PAGE.partition("## Limits")[2], re.MULTILINE))
    printed = {
        "event with its headers": f"{MAX_EVENT_BYTES >> 20} MiB",
        "routing key": f"{MAX_KEY_LENGTH:,} characters",
        "name of a scope": f"{MAX_NAME_LENGTH} letters",
        "segments of a stream at": f"{MAX_SEGMENTS:,}",
        "segments of a stream that": f"{MAX_SCALED_SEGMENTS:,}",
        "state of a group": f"{DEFAULT_STATE_LIMIT_BYTES >> 20} MiB",
        "transaction": f"within {STAGING_RETENTION_SECONDS / 3600:.0f} hours",
        "unstored events": f"{MAX_UNSTORED_BYTES >> 20} MiB",
        "events of one call": f"{worker.MAX_BATCH_EVENTS:,}",
        "event of an": f"{ENVELOPE_BYTES >> 10} KiB less than the store's largest append",
        "one append": f"{MAX_APPEND_BYTES >> 20} MiB, {MAX_ATTRIBUTE_CHANGES} changes",
        "segments of a SQLite file": f"{MAX_SEGMENTS_OF_A_FILE / 1e6:.1f} million; {MAX_SEGMENT_BYTES >> 30:,} GiB",
    }
    assert [
        (what, limit)
        for what, limit in printed.items()
        if not any(row.startswith(what) and limit in text for row, text in limits.items())
    ] == []


def test_beyond_a_limit_of_an_event_a_write_raises_what_the_table_says(store_url: str) -> None:
    with rg.connect(store_url) as client:
        client.streams.create("shop/orders")
        with client.writer("shop/orders") as writer:
            writer.write(bytes(MAX_EVENT_BYTES - 100), routing_key="k" * MAX_KEY_LENGTH)
            with pytest.raises(rg.EventTooLargeError):
                writer.write(bytes(MAX_EVENT_BYTES - 100), headers={"trace": bytes(200)})
            with pytest.raises(rg.EventTooLargeError):
                writer.write_many([bytes(MAX_EVENT_BYTES // 2 + 1)] * 2)
            with pytest.raises(rg.InvalidArgumentError):
                writer.write(b"", routing_key="k" * (MAX_KEY_LENGTH + 1))
