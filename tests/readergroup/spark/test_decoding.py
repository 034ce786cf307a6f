"""JSON decoded by msgspec has the values that `json` and Arrow give, event by event."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

import readergroup as rg
from readergroup.spark.decoding import EventDecoder

FIELDS: Final = (
    pyarrow.field("long", pyarrow.int64()),
    pyarrow.field("byte", pyarrow.int8()),
    pyarrow.field("double", pyarrow.float64()),
    pyarrow.field("float", pyarrow.float32()),
    pyarrow.field("flag", pyarrow.bool_()),
    pyarrow.field("text", pyarrow.string()),
    pyarrow.field("bytes", pyarrow.binary()),
    pyarrow.field("at", pyarrow.timestamp("us", "UTC")),
    pyarrow.field("day", pyarrow.date32()),
    pyarrow.field("price", pyarrow.decimal128(8, 2)),
    pyarrow.field("inner", pyarrow.struct([("long", pyarrow.int64()), ("text", pyarrow.string())])),
    pyarrow.field("list", pyarrow.list_(pyarrow.int64())),
    pyarrow.field("map", pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    pyarrow.field("all", pyarrow.list_(pyarrow.struct([("map", pyarrow.map_(pyarrow.string(), pyarrow.int64()))]))),
)
NAMES: Final = [each.name for each in FIELDS]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, 127, 128, 2**24, 2**53, 2**53 + 1, 2**63, -(2**63)]),
    st.floats() | st.sampled_from([1.0, 1.5, -0.0, 1e300, 1e16]),
    st.text(st.characters(codec=None), max_size=5) | st.sampled_from(["\ud800", "\0", "ä"]),
    st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-01T02:00:00.123456+02:00", "2026-01-01", "12.50", "12.505"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, "other"]), inner, max_size=3),
    max_leaves=6,
)
fitting = st.fixed_dictionaries(
    {},
    optional={
        "long": st.none() | st.integers(-(2**63), 2**63 - 1),
        "double": st.floats(allow_nan=False) | st.integers(-(2**53), 2**53),
        "float": st.floats(width=32, allow_nan=False),
        "flag": st.booleans(),
        "text": st.text(),
        "bytes": st.text(),
        "at": st.just("2026-01-01T02:00:00+02:00"),
        "inner": st.fixed_dictionaries({}, optional={"long": st.integers(0, 9), "text": st.text(), "other": values}),
        "list": st.lists(st.none() | st.integers(0, 9)),
        "map": st.dictionaries(st.text(), st.integers(0, 9)),
        "other": values,
    },
)
documents = st.one_of(fitting, st.dictionaries(st.sampled_from([*NAMES, "other"]), values, max_size=4), values)
texts = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    documents,
    st.booleans(),
    st.none() | st.just(1),
).map(lambda text: text.encode("utf-8", "surrogatepass"))
#: Anything like JSON, with bytes lost, doubled and changed.
damaged = st.builds(
    lambda data, at, patch: data[:at] + patch + data[at + len(patch) :],
    texts,
    st.integers(0, 40),
    st.binary(max_size=2) | st.sampled_from([b"}{", b'","', b"01", b"\\u", b"1.", b"1E9", b"NaN", b'"long":', b"\n"]),
)


def reference(event: bytes) -> list[Any] | None:
    """The columns of one event, each None where the event does not fit; None if it does not fit as a whole."""
    try:
        fields = rg.JsonSerializer().loads(event)
    except (ValueError, RecursionError):
        return None
    if fields is None:
        fields = {}
    return [column(each, fields.get(each.name)) for each in FIELDS] if isinstance(fields, dict) else None


def column(field: pyarrow.Field, value: Any) -> pyarrow.Array:
    types = pyarrow.types
    kind = field.type
    is_text = types.is_timestamp(kind) or types.is_date(kind) or types.is_decimal(kind)
    try:
        if is_trap(value, kind):
            raise ValueError
        if types.is_floating(kind) and isinstance(value, int):
            value = float(value)
        return pyarrow.array([value], pyarrow.string() if is_text else kind).cast(kind)
    except (ValueError, TypeError, OverflowError):
        return None


def is_trap(value: Any, kind: pyarrow.DataType) -> bool:
    """Whether Arrow would take a value of another type, drop a fraction, or end this process."""
    types = pyarrow.types
    if types.is_integer(kind):
        return isinstance(value, float) and not value.is_integer()
    if types.is_floating(kind):
        return isinstance(value, bool)
    if value is None or not types.is_nested(kind):
        return False
    if types.is_list(kind):
        return not isinstance(value, list) or any(is_trap(each, kind.value_type) for each in value)
    if not isinstance(value, dict):
        return True
    if types.is_struct(kind):
        return any(is_trap(value.get(each.name), each.type) for each in kind)
    return any(is_trap(each, kind.item_type) for each in value.values())


@given(st.lists(texts | damaged, min_size=1, max_size=8))
def test_each_event_has_the_values_of_json_or_does_not_fit(events: list[bytes]) -> None:
    check(events)


def check(events: Sequence[bytes]) -> None:
    decoded = EventDecoder(FIELDS, "json").decode(pyarrow.array(events, pyarrow.binary()))
    misfits = {each.row: each.column for each in decoded.misfits}
    for row, event in enumerate(events):
        expected = reference(event)
        found = [decoded.columns[name].slice(row, 1) for name in NAMES]
        if expected is None:
            assert misfits.pop(row) is None
            assert all(array.null_count == 1 for array in found)
            continue
        wrong = [name for name, array in zip(NAMES, expected, strict=True) if array is None]
        assert misfits.pop(row, "fits") == (wrong[0] if wrong else "fits")
        for array, one in zip(expected, found, strict=True):
            assert repr(one.to_pylist()) == repr([None] if array is None else array.to_pylist())  # NaN equals no NaN
    assert not misfits


@pytest.mark.parametrize(
    "event",
    [
        b'{"long":1}{"long":2}',
        b'{"long":1} null {"long":2}',
        b'{"long":1},"text":"x"',
        b'{"long":1,"long":2}',
        b'{"l\\u006fng":1}',
        b'{"other":"\xff","long":1}',
        b'{"other":"\\ud800","long":1}',
        b'{"other":1e400,"double":1e400}',
        b'{"long":1e2,"byte":128}',
        b'{"float":16777217}',
        b'{"long":1.0}',
        b'{"long":1.5}',
        b'{"inner":{"long":1.5}}',
        b'{"list":[1.5]}',
        b'{"all":[{"map":{"x":1.5}}]}',
        b'{"long":true}',
        b'{"map":[null]}',
        b'{"map":[{"key":"a","value":1}]}',
        b'{"map":[]}',
        b'{"inner":[]}',
        b'{"double":true}',
        b'{"double":12345678901234567890}',
        b'{"double":9007199254740993}',
        b'{"double":-9007199254740993,"float":true}',
        b'{"double":1%s}' % (b"0" * 400),
        b'{"list":""}',
        b'{"long":9223372036854775808}',
        b'{"other":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xef\xbb\xbf{}",
        '{"long":1}'.encode("utf-16"),
        b"",
        b" ",
        b"\0",
        b'{"long":1}\0',
    ],
)
def test_unusual_text(event: bytes) -> None:
    check([b'{"long":7}', event, b"{}"])


def test_times_in_nested_types_are_text_too() -> None:
    kind = pyarrow.struct([("at", pyarrow.list_(pyarrow.timestamp("us", "UTC"))), ("price", pyarrow.decimal128(8, 2))])
    decoder = EventDecoder([pyarrow.field("a b", kind)], "json")
    events = [b'{"a b":{"at":["1970-01-01T00:00:01Z",null],"price":"1.50"}}', b'{"a b":{"at":[5]}}']
    decoded = decoder.decode(pyarrow.array(events, pyarrow.binary()))
    first, second = decoded.columns["a b"].cast(kind).to_pylist()
    assert first["at"][0].timestamp() == 1 and first["price"] == Decimal("1.50")
    assert second is None and [each.row for each in decoded.misfits] == [1]


@pytest.mark.parametrize("serializer", ["json", "msgpack"])
@pytest.mark.parametrize("other", [{}, {"x": [{"y": {"z": True}}]}], ids=["all fit", "not all fit"])
def test_an_integer_gives_the_nearest_floating_point_number(serializer: str, other: dict[str, Any]) -> None:
    """Whether or not another event makes all be decoded in the slower way."""
    dumps = {"json": rg.JsonSerializer(), "msgpack": rg.MsgpackSerializer()}[serializer].dumps
    for kind, integer, nearest in (
        (pyarrow.float64(), 2**53 + 1, 2.0**53),
        (pyarrow.float64(), 2**64 - 1, 2.0**64),
        (pyarrow.float32(), 2**24 + 1, 2.0**24),
        (pyarrow.float32(), -(2**63), -(2.0**63)),
    ):
        nested = pyarrow.list_(
            pyarrow.struct([("y", pyarrow.map_(pyarrow.string(), kind)), ("text", pyarrow.string())])
        )
        rows = [{"x": [{"y": {"z": integer, "null": None}, "text": "a"}, None, {"y": {"z": 1.5}}]}, {"x": None}, other]
        decoded = EventDecoder([pyarrow.field("x", nested)], serializer).decode(
            pyarrow.array([dumps(row) for row in rows], pyarrow.binary())
        )
        first, *rest = decoded.columns["x"].to_pylist()
        assert first == [
            {"y": [("z", nearest), ("null", None)], "text": "a"},
            None,
            {"y": [("z", 1.5)], "text": None},
        ]
        assert rest == [None, None] and len(decoded.misfits) == bool(other)


TEXTS: Final = pyarrow.list_(pyarrow.string())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (TEXTS, "abc"),
        (TEXTS, ""),
        (pyarrow.list_(TEXTS), ["abc"]),
        (pyarrow.map_(pyarrow.string(), TEXTS), {"x": "abc"}),
        (pyarrow.struct([("x", TEXTS)]), []),
        (pyarrow.struct([("x", TEXTS)]), ""),
        (pyarrow.map_(pyarrow.string(), TEXTS), []),
        (pyarrow.float64(), True),
        (pyarrow.list_(pyarrow.float64()), [True]),
    ],
    ids=str,
)
@pytest.mark.parametrize("serializer", ["json", "msgpack"])
def test_a_value_of_another_type_does_not_fit(serializer: str, kind: pyarrow.DataType, value: Any) -> None:
    """Arrow takes text as the array of its characters, for example."""
    dumps = {"json": rg.JsonSerializer(), "msgpack": rg.MsgpackSerializer()}[serializer].dumps
    decoded = EventDecoder([pyarrow.field("x", kind)], serializer).decode(
        pyarrow.array([dumps({"x": value}), dumps({"x": None})], pyarrow.binary())
    )
    assert decoded.columns["x"].null_count == 2 and [each.row for each in decoded.misfits] == [0]


def test_without_columns_events_are_checked_nevertheless() -> None:
    decoded = EventDecoder([], "json").decode(pyarrow.array([b'{"x":1}', b"{", b"5"], pyarrow.binary()))
    assert decoded.columns == {} and [each.row for each in decoded.misfits] == [1, 2]
