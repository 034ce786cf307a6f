"""Appends and their results survive the way to another process and back, and always have room in a slot."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from hypothesis import given
from hypothesis import strategies as st

from synchronizer.errors import NotFoundError
from synchronizer.store import ANY, Append, Appended, AttributeChange, Conflict
from synchronizer.stores.checks import check_appends
from synchronizer.stores.sqlite import requests as sqlite_requests
from synchronizer.stores.sqlite.commit_slots import MAX_ANSWERS_BYTES, MAX_REQUEST_BYTES
from synchronizer.stores.sqlite.group_commit import Step, StepBatch
from synchronizer.stores.sqlite.requests import _LONGER_THAN_ANY, MAX_APPENDS, Request
from synchronizer.stores.sqlite.shared_commit import _requests

names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40)
values = st.binary(max_size=300)
offsets = st.integers(0, _LONGER_THAN_ANY - 1)
changes = st.builds(AttributeChange, st.none() | st.just(ANY) | values, st.none() | values)
appends = st.builds(
    Append,
    names,
    st.binary(max_size=3000) | st.sampled_from([20_000, 60_000]).map(bytes),
    st.none() | offsets,
    st.dictionaries(names, changes, max_size=4),
)
several = st.lists(appends, max_size=5, unique_by=lambda each: each.segment)
requests = appends.map(lambda each: Request([each], is_together=False)) | several.map(
    lambda each: Request(each, is_together=True)
)
conflicts = st.builds(
    Conflict, offsets, st.binary(max_size=2500), st.dictionaries(names, st.none() | values, max_size=3)
)
ends = st.builds(Appended, offsets, offsets)
LONGEST = Appended(_LONGER_THAN_ANY - 1, _LONGER_THAN_ANY - 1)


@given(st.lists(requests, max_size=10))
def test_requests_arrive_as_they_were(sent: list[Request]) -> None:
    for request in sent:
        check_appends(request.appends)  # what is tried is what a store accepts
    assert sqlite_requests.decode(b"".join(map(sqlite_requests.encode, sent))) == sent


def test_an_expected_offset_may_be_any_number() -> None:
    """Larger ones than the form has room for are as wrong as the first one that no segment can have."""
    (arrived,) = sqlite_requests.decode(sqlite_requests.encode(Request([Append("s", b"", 1 << 70)], is_together=False)))
    assert arrived.appends[0].expected_offset == _LONGER_THAN_ANY


class Answer(NamedTuple):
    """In place of a request: what comes of it."""

    result: Any

    def run(self, connection: sqlite3.Connection) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def answered(results: Sequence[Any]) -> list[Any]:
    """What the owner of requests with these results reads."""
    nowhere = cast(sqlite3.Connection, None)
    data = sqlite_requests.answer(nowhere, cast("list[Request]", list(map(Answer, results))), MAX_ANSWERS_BYTES)
    assert len(data) <= MAX_ANSWERS_BYTES
    return sqlite_requests.decode_answers(data)


@given(
    st.lists(
        ends
        | conflicts
        | st.lists(ends, max_size=3).map(tuple)
        | st.dictionaries(names, conflicts, min_size=1, max_size=3)
        | st.just(NotFoundError("there is no such segment")),
        max_size=MAX_APPENDS // 3,
    )
)
def test_answers_arrive_as_they_were_or_not_at_all(results: list[Any]) -> None:
    for result, arrived in zip(results, answered(results), strict=True):
        if isinstance(result, NotFoundError):
            assert arrived is None
        elif isinstance(result, Appended | tuple):
            assert arrived == result, "an append that was written must be answered"
        else:
            assert arrived in (result, None)


def test_a_conflict_is_answered_if_there_is_room() -> None:
    fits, too_large = Conflict(1, bytes(1500), {"a": None}), Conflict(1, bytes(MAX_ANSWERS_BYTES))
    assert answered([fits, too_large, {"s": fits}, {"s": Conflict(2)}]) == [fits, None, None, {"s": Conflict(2)}]


@given(st.lists(requests, max_size=MAX_APPENDS + 10), st.lists(conflicts, max_size=10))
def test_what_is_handed_over_can_always_be_answered(sent: list[Request], refused: list[Conflict]) -> None:
    results = [tuple([LONGEST] * len(each.appends)) if each.is_together else LONGEST for each in handed_over(sent)]
    assert answered([*refused, *results])[len(refused) :] == results


def test_the_most_that_is_handed_over_can_be_answered() -> None:
    small = Append("s", b"")
    alone, together = (
        Request([small], is_together=False),
        Request([Append(str(n)) for n in range(32)], is_together=True),
    )
    assert len(handed_over([alone] * (MAX_APPENDS + 1))) == MAX_APPENDS
    assert answered([LONGEST] * MAX_APPENDS) == [LONGEST] * MAX_APPENDS
    assert len(handed_over([together] * 3)) == 2
    assert answered([(LONGEST,) * 32] * 2) == [(LONGEST,) * 32] * 2
    assert len(handed_over([Request([], is_together=True)] * 2000)) == MAX_APPENDS
    assert answered([(LONGEST,)] * MAX_APPENDS) == [(LONGEST,)] * MAX_APPENDS


def handed_over(sent: list[Request]) -> list[Request]:
    """Those of the requests, of one call each, that another process commits: they have room in a slot."""
    if not sent:
        return []
    steps: list[Step[sqlite3.Connection]] = [Step(each.run, request=each) for each in sent]
    handed, data = _requests(StepBatch(steps[0], lambda place: steps[place:]))
    assert len(data) <= MAX_REQUEST_BYTES
    arrived = sqlite_requests.decode(data) if data else []
    assert arrived == [step.request for step in handed] == sent[: len(arrived)]
    return arrived
