"""Names, ranges and cuts: what is wrong is refused where it enters."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from readergroup.streams.config import (
    KeyRange,
    ScalingPolicy,
    SegmentId,
    StreamCut,
    check_stream_name,
    even_ranges,
    number_of,
    segment_id,
    stream_of,
)
from synchronizer.errors import InvalidArgumentError

S0, S1 = SegmentId("shop/orders/0"), SegmentId("shop/orders/1")


@pytest.mark.parametrize("name", ["shop/orders", "a/b", "A.b-c_9/" + "x" * 250])
def test_a_stream_is_named_by_scope_and_name(name: str) -> None:
    assert check_stream_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["orders", "", "/", "a/", "/b", "a/b/c", "a b/c", "a/ö", "a/b\n", "a/" + "x" * 251, "x" * 251 + "/a", 7, None],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError):
        check_stream_name(name)


def test_a_segment_is_named_by_its_stream_and_number() -> None:
    assert segment_id("shop/orders", 3) == "shop/orders/3"
    assert (stream_of(SegmentId("shop/orders/3")), number_of(SegmentId("shop/orders/3"))) == ("shop/orders", 3)


@pytest.mark.parametrize("text", ["shop/orders", "shop/orders/", "shop/orders/x", "shop/orders/-1", "a/b/01", "a/b/²"])
def test_other_names_of_segments_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        number_of(SegmentId(text))


@given(st.integers(1, 500))
def test_even_ranges_follow_one_another_from_0_to_1(count: int) -> None:
    ranges = even_ranges(count)
    assert len(ranges) == count
    assert (ranges[0].low, ranges[-1].high) == (0.0, 1.0)
    assert all(left.high == right.low for left, right in zip(ranges, ranges[1:], strict=False))


def test_a_range_splits_into_halves_until_it_is_too_narrow() -> None:
    left, right = KeyRange(low=0.5, high=1.0).split()
    assert (left, right) == (KeyRange(low=0.5, high=0.75), KeyRange(low=0.75, high=1.0))
    narrow = KeyRange(low=0.5, high=0.5000000000000001)
    with pytest.raises(InvalidArgumentError, match="too narrow"):
        narrow.split()


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.5), (0.6, 0.5), (-0.1, 0.5), (0.5, 1.1)])
def test_a_range_that_is_none_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValidationError):
        KeyRange(low=low, high=high)


@pytest.mark.parametrize("segments", [0, -1, 10_001])
def test_a_stream_has_at_least_one_segment_and_not_too_many(segments: int) -> None:
    with pytest.raises(InvalidArgumentError, match="segments"):
        ScalingPolicy.fixed(segments)


def test_a_cut_is_a_value() -> None:
    cut = StreamCut(stream="shop/orders", offsets={S0: 120, S1: 0}, incarnation="a1")
    same = StreamCut(stream="shop/orders", offsets={S1: 0, S0: 120}, incarnation="a1")
    assert cut == same and hash(cut) == hash(same)
    assert cut != StreamCut(stream="shop/orders", offsets={S0: 120, S1: 1}, incarnation="a1")
    assert StreamCut.model_validate_json(cut.model_dump_json()) == cut
    assert pickle.loads(pickle.dumps(cut)) == cut
    assert str(cut) == "shop/orders[0:120, 1:0]"


def test_the_json_form_of_a_cut_is_readable() -> None:
    cut = StreamCut(stream="shop/orders", offsets={S1: 5, S0: 120})
    assert cut.model_dump_json(exclude_none=True) == (
        '{"stream":"shop/orders","offsets":{"shop/orders/0":120,"shop/orders/1":5}}'
    )


@pytest.mark.parametrize("offsets", [{}, {SegmentId("shop/other/0"): 1}, {S0: -1}, {SegmentId("nonsense"): 0}], ids=str)
def test_a_cut_that_is_none_is_refused(offsets: dict[SegmentId, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="offsets|name at least one|another stream|must have the form"):
        StreamCut(stream="shop/orders", offsets=offsets)
