"""The program's logging may raise: the SDK continues."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from readergroup.streams.manager import StreamManager
from readergroup.streams.serializers import BytesSerializer
from readergroup.streams.writing.writer import EventWriter
from synchronizer import ManualClock, open_store
from synchronizer.loggers import get_logger
from synchronizer.testing import FailingStore
from tests.waiting import until

ROOT = Path(__file__).parents[2]


class RaisingHandler(logging.Handler):
    """Raises what a handler or filter of a program may raise, for each record of the SDK's."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def handle(self, record: logging.LogRecord) -> bool:
        self.messages.append(record.getMessage())
        raise AttributeError("'LogRecord' object has no attribute 'group'")


@pytest.fixture
def raising() -> Iterator[RaisingHandler]:
    handler, loggers = RaisingHandler(), [logging.getLogger(name) for name in ("readergroup", "synchronizer")]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)


def test_an_error_of_a_handler_or_filter_is_told_on_stderr(
    raising: RaisingHandler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = get_logger("synchronizer.tests.one")
    assert get_logger("synchronizer.tests.one") is logger is logging.getLogger("synchronizer.tests.one")
    logger.warning("hello %s", "world")
    assert raising.messages == ["hello world"]
    told = capsys.readouterr().err
    assert "has no attribute 'group'" in told and "hello %s" in told and Path(__file__).name in told
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger.warning("again")
    assert raising.messages == ["hello world", "again"] and not capsys.readouterr().err


def test_an_interrupt_in_a_handler_is_not_held_back(raising: RaisingHandler, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(record: logging.LogRecord) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(raising, "handle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        get_logger("synchronizer.tests.two").warning("hello")


def test_a_writer_keeps_its_events_in_an_outage(raising: RaisingHandler) -> None:
    clock, failing = ManualClock(), FailingStore(open_store("memory://"))
    streams = StreamManager(failing, clock=clock)
    streams.create("shop/orders")
    writer = EventWriter(streams, "shop/orders", serializer=BytesSerializer(), timeout=2.0)
    failing.unavailable = True
    writer.write(b"first")

    def is_logged() -> bool:
        clock.advance(0.1)
        return any("keeps trying" in each for each in raising.messages)

    until(is_logged)
    failing.unavailable = False

    def is_stored() -> bool:
        clock.advance(0.1)
        return streams.info("shop/orders").tail != streams.info("shop/orders").head

    until(is_stored)
    assert writer.failure is None
    writer.close()


def test_every_module_gets_its_logger_here() -> None:
    """The tests and the command configure the loggers of a program instead."""
    asked = {
        f"{file.relative_to(ROOT)}"
        for package in ("synchronizer", "notifications", "readergroup")
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "getLogger"
    }
    assert asked == {"synchronizer/loggers.py", "readergroup/cli/demo.py", "readergroup/demo/counting.py"}
