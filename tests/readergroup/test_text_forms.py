"""Texts that users store, such as cuts and checkpoints, are written and read as in the first release."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import readergroup as rg
from readergroup.spark.offsets import cuts_of, offset_of, offset_of_several
from readergroup.streams.config import SegmentId
from tests.golden import golden

SEGMENT = SegmentId("shop/orders/0")
CUT = rg.StreamCut(stream="shop/orders", offsets={SEGMENT: 7, SegmentId("shop/orders/11"): 9}, incarnation="a1")
POINTER = rg.EventPointer(SEGMENT, "a1", 811)
#: A value, how it is written, and how it is read.
TEXTS: dict[str, tuple[object, str, Callable[[str], object]]] = {
    "revision": (rg.Revision(120, 1), str(rg.Revision(120, 1)), rg.Revision.parse),
    "pointer": (POINTER, str(POINTER), rg.EventPointer.parse),
    "offset of a Spark query": ({CUT.stream: CUT}, json.dumps(offset_of(CUT)), cuts_of),
}
MODELS: list[Any] = [
    CUT,
    rg.Checkpoint(group="billing", name="nightly", number=41, cuts={"shop/orders": CUT}, automatic=True, lost=2),
    rg.DeadLetter(data=b"\x00\xff", pointer=POINTER, error="ValueError: ä", attempts=5),
    rg.RecordRange(group="billing", life="abc", start=0, end=700),
    rg.SegmentRange(segment=SEGMENT, incarnation="a1", start=7, end=811),
    rg.StagedPart(
        stream="shop/orders",
        incarnation="a1",
        key="job",
        generation=3,
        name="655cb26a0123456789abcdef",
        segments=(0, 0, 1),
        events=12,
        size=1234,
    ),
]
TEXTS |= {type(each).__name__: (each, each.model_dump_json(), type(each).model_validate_json) for each in MODELS}


def test_texts_are_written_and_read_as_in_the_first_release() -> None:
    today = {name: text for name, (_, text, _) in TEXTS.items()}
    stored = json.loads(golden("texts-v1.json", json.dumps(today, indent=1, ensure_ascii=False).encode()))
    assert stored == today
    for name, (value, _, read) in TEXTS.items():
        assert read(stored[name]) == value, name


def test_the_offset_of_a_query_on_several_streams_keeps_its_form() -> None:
    other = rg.StreamCut(stream="shop/returns", offsets={SegmentId("shop/returns/0"): 5}, incarnation="b1")
    cuts = {other.stream: other, CUT.stream: CUT}
    today = json.dumps(offset_of_several(cuts))
    stored = golden("offset-of-several-streams-v2.json", today.encode()).decode()
    assert stored == today
    assert cuts_of(stored) == cuts
