from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from notifications import Change
from synchronizer import Revision
from tests.notifications.counting import Add, Counted

CHANGE = Change(
    source="visits",
    revision=Revision(120, 1),
    cause="add",
    seen_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    updates=(Add(amount=7),),
)


def test_a_notification_takes_what_it_carries_from_the_change() -> None:
    told = Counted(change=CHANGE, value=7)
    assert (told.source, told.revision, told.cause, told.gap) == ("visits", Revision(120, 1), "add", False)
    assert told.seen_at == CHANGE.seen_at


def test_a_notification_is_frozen_and_refuses_unknown_fields() -> None:
    told = Counted(change=CHANGE, value=7)
    with pytest.raises(ValidationError, match="frozen"):
        told.value = 8
    with pytest.raises(ValidationError, match="extra"):
        Counted(change=CHANGE, value=7, vaule=8)  # type: ignore[call-arg]


def test_the_json_form_of_a_notification_reads_back_without_the_updates() -> None:
    told = Counted(change=CHANGE, value=7)
    assert told.model_dump_json() == (
        '{"change":{"source":"visits","revision":{"offset":120,"index":1},"cause":"add",'
        '"seen_at":"2026-01-02T03:04:05Z","gap":false,"index":0},"value":7}'
    )
    assert Counted.model_validate_json(told.model_dump_json()) == told.model_copy(
        update={"change": CHANGE.model_copy(update={"updates": ()})}
    )


def test_after_a_gap_the_notification_is_the_same_but_for_the_gap() -> None:
    told = Counted(change=CHANGE, value=7)
    gapped = told.after_gap()
    assert gapped.gap and not told.gap
    assert (gapped.value, gapped.revision, gapped.seen_at) == (7, told.revision, told.seen_at)


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValidationError, match="timezone"):
        Change(source="visits", revision=Revision(0, 0), cause="add", seen_at=datetime(2026, 1, 2))
