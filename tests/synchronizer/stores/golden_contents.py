"""What the golden files of the stores hold, and the calls that write it: the same for every store."""

from __future__ import annotations

from typing import Final

import pytest

from synchronizer.errors import AlreadyExistsError, NotFoundError, SealedError, TruncatedError
from synchronizer.store import Append, Appended, AppendResult, AttributeChange, SegmentCopy, SegmentStore
from tests.golden import PERIOD

#: Larger than what a row of any store holds.
LARGE: Final = PERIOD * 4_200
#: Less is freed by a truncation in the middle of a row.
MIDDLE: Final = 63 * len(PERIOD)
LONG_NAME: Final = "shop/" + "long/" * 80 + "name"
ODD_NAME: Final = "shop/ä b.*>~%/"


def write_contents(store: SegmentStore) -> None:
    """Small, large, shared, sealed and truncated segments, their attributes, and names that are used up or free."""
    for name in ("small", "large", "shared", "empty", "truncated", "deleted", "forgotten", "together"):
        assert store.create(f"shop/{name}")
    for number in range(10):
        store.append("shop/small", b"event %d;" % number)
    store.append(
        "shop/small", b"", attributes={"mark": AttributeChange(None, b"26"), "gone": AttributeChange(None, b"1")}
    )
    store.append("shop/small", b"", attributes={"gone": AttributeChange(b"1", None)})
    store.append("shop/small", b"", attributes={"mark": AttributeChange(b"26", b"27")})
    store.append("shop/large", LARGE)
    store.append("shop/large", PERIOD)
    store.seal("shop/large")
    store.append("shop/shared", b"before", attributes={"a": AttributeChange(None, b"aa")})
    _concat(store, "shop/shared", "shop/large")
    store.append("shop/shared", b"", attributes={"b": AttributeChange(None, b"")})
    _concat(store, "shop/shared", "shop/large")
    names = {"c/1": b"c1", "é": "é".encode(), ODD_NAME: b"odd", LONG_NAME: b"long"}
    store.append("shop/shared", b"", attributes={name: AttributeChange(None, value) for name, value in names.items()})
    if store.guarantees.server_side_copy:
        assert store.copy_segments([SegmentCopy("shop/large", "shop/copy", MIDDLE, len(LARGE))])
    store.append("shop/truncated", LARGE)
    store.truncate("shop/truncated", MIDDLE)
    store.seal("shop/empty")
    store.append("shop/deleted", b"data")
    store.delete("shop/deleted")
    store.forget("shop/forgotten")
    assert store.create(LONG_NAME) and store.create(ODD_NAME)
    store.append(LONG_NAME, b"long")
    store.append(ODD_NAME, b"odd")
    marks = {"mark": AttributeChange(None, b"2")}
    store.append_together([Append("shop/small", b"last", 80), Append("shop/together", b"first", 0, marks)])


def check_contents(store: SegmentStore) -> None:
    """Every read answers what `write_contents` wrote."""
    copies = {"shop/copy"} if store.guarantees.server_side_copy else set()
    names = {"shop/small", "shop/large", "shop/shared", "shop/empty", "shop/truncated", "shop/together"}
    # "shop/parts" is written by the test of one store alone.
    assert {*store.list()} - {"shop/parts"} == names | copies | {LONG_NAME, ODD_NAME}
    assert {*store.list("shop/long/")} == {LONG_NAME}
    assert store.read("shop/small", 0, 1000) == b"".join(b"event %d;" % number for number in range(10)) + b"last"
    assert store.attributes("shop/small") == {"mark": b"27"}
    assert store.info("shop/large").sealed and store.info("shop/empty").sealed
    assert _all(store, "shop/large") == LARGE + PERIOD
    assert _all(store, "shop/shared") == b"before" + 2 * (LARGE + PERIOD)
    assert store.attributes("shop/shared") == {
        **{"a": b"aa", "b": b"", "c/1": b"c1", "é": "é".encode(), ODD_NAME: b"odd", LONG_NAME: b"long"}
    }
    assert store.attributes("shop/shared", "c/") == {"c/1": b"c1"}
    assert _all(store, "shop/truncated") == LARGE[MIDDLE:]
    with pytest.raises(TruncatedError):
        store.read("shop/truncated", MIDDLE - 1, 10)
    for name in copies:
        assert store.info(name).start_offset == MIDDLE and store.info(name).sealed
        assert _all(store, name) == LARGE[MIDDLE:]
    assert (_all(store, LONG_NAME), _all(store, ODD_NAME)) == (b"long", b"odd")
    assert _all(store, "shop/together") == b"first" and store.attributes("shop/together") == {"mark": b"2"}
    for name in ("shop/deleted", "shop/forgotten"):
        with pytest.raises(NotFoundError):
            store.info(name)
    with pytest.raises(AlreadyExistsError):
        store.create("shop/deleted")


def use_contents(store: SegmentStore) -> None:
    """What the golden files hold can be changed as if this release had written it."""
    assert store.append("shop/small", LARGE, expected_offset=84) == Appended(84, 84 + len(LARGE))
    with pytest.raises(SealedError):
        store.append("shop/large", b"more")
    before = store.info("shop/small").length
    assert _concat(store, "shop/small", "shop/large") == Appended(before, before + len(LARGE + PERIOD))
    mark = {"mark": AttributeChange(b"27", b"28")}
    assert isinstance(store.append("shop/small", b"", attributes=mark), Appended)
    assert isinstance(
        store.append("shop/shared", b"", attributes={LONG_NAME: AttributeChange(b"long", None)}), Appended
    )
    store.truncate("shop/large", MIDDLE)
    store.truncate("shop/truncated", len(LARGE))
    for name in ("shop/large", "shop/empty", ODD_NAME):
        store.delete(name)
    store.forget(LONG_NAME)
    assert store.create("shop/forgotten") and store.create(LONG_NAME)
    assert store.read("shop/shared", 6, 1 << 20)[: len(LARGE)] == LARGE
    assert _all(store, "shop/small")[before:] == LARGE + PERIOD
    assert LONG_NAME not in store.attributes("shop/shared")
    assert {*store.list("shop/long/")} == {LONG_NAME}


def _concat(store: SegmentStore, segment: str, source: str) -> AppendResult:
    if store.guarantees.server_side_copy:
        return store.concat(segment, source)
    return store.append(segment, _all(store, source))


def _all(store: SegmentStore, segment: str) -> bytes:
    info = store.info(segment)
    data = b""
    while info.start_offset + len(data) < info.length:
        data += store.read(segment, info.start_offset + len(data), 1 << 20)
    return data
