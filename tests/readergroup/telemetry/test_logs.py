"""Records of a group say in fields what they concern."""
# ruff: noqa: F811

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import readergroup as rg
from readergroup.telemetry.logs import FIELDS
from readergroup.testing import (  # noqa: F401
    FailingStore,
    InstantClock,
    drain,
    failing_store,
    manual_clock,
    reader_group_client,
    second_client,
)
from tests.places import ROOT

STREAM = "shop/orders"
#: Of no group: a stream of several.
OTHERS = {"stream %s was deleted"}


def fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in FIELDS}


def of_readergroup(caplog: pytest.LogCaptureFixture, words: str) -> dict[str, object]:
    (record,) = [each for each in caplog.records if words in each.getMessage()]
    return fields(record)


def test_a_retry_and_a_dead_letter(reader_group_client: rg.Client, caplog: pytest.LogCaptureFixture) -> None:
    client = reader_group_client
    for stream in (STREAM, "shop/dead"):
        client.streams.create(stream)
    with client.writer(STREAM) as writer:
        writer.write(b"x")
    group = client.groups.create("billing", streams=[STREAM])

    def fail(event: rg.Event[bytes]) -> None:
        raise ValueError

    drain(group.pool(fail, retry=rg.RetryPolicy(attempts=2, dead_letters="shop/dead")))
    for words in ("attempt 1 of 2", "was moved to the dead letters"):
        found = of_readergroup(caplog, words)
        assert found.pop("reader")
        assert found == {"group": "billing", "segment": f"{STREAM}/0", "revision": None}


def test_a_dead_reader(
    reader_group_client: rg.Client,
    second_client: rg.Client,
    manual_clock: InstantClock,
    failing_store: FailingStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader_group_client.streams.create(STREAM)
    ours = reader_group_client.groups.create("billing", streams=[STREAM]).reader("ours")
    theirs = second_client.groups.get("billing").reader("theirs")
    ours.read(timeout=0)
    failing_store.unavailable = True
    manual_clock.advance(15)
    failing_store.unavailable = False
    ours.read(timeout=0)
    theirs.read(timeout=0)
    dead = of_readergroup(caplog, "ours of group/billing is dead")
    assert rg.Revision.parse(str(dead.pop("revision")))
    assert dead == {"group": "billing", "reader": "ours", "segment": None}
    assert of_readergroup(caplog, "was declared dead and rejoins")["reader"] == "ours"


def words_without_fields(file: Path) -> set[str]:
    """The messages that are logged without fields."""
    return {
        ast.literal_eval(node.args[0])
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "_logger"
        and not any(each.arg == "extra" for each in node.keywords)
    }


def test_each_record_of_a_group_has_the_fields() -> None:
    files = [
        file for folder in ("group", "scaling", "record") for file in (ROOT / "readergroup" / folder).rglob("*.py")
    ]
    assert set().union(*map(words_without_fields, files)) == OTHERS and len(files) > 30
