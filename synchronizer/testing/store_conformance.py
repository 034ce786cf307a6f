"""`SegmentStoreConformance`: the contract of `SegmentStore`, sentence by sentence, as a suite for every backend."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import pytest

from ..clock import SystemClock
from ..errors import (
    AlreadyExistsError,
    ClosedError,
    InvalidArgumentError,
    NotFoundError,
    SealedError,
    TruncatedError,
)
from ..store import (
    ANY,
    MAX_APPEND_BYTES,
    MAX_ATTRIBUTE_CHANGES,
    MAX_CREATED,
    MAX_CREATED_BYTES,
    MAX_DELTA_BYTES,
    MAX_NAME_LENGTH,
    Append,
    Appended,
    AttributeChange,
    Conflict,
    SegmentCopy,
    SegmentInfo,
    SegmentStart,
    SegmentStore,
)
from ..stores import open_store

T = TypeVar("T")
#: Names that a store would confuse if it split, joined, case-folded or pattern-matched them.
_LOOK_ALIKES = (
    *(
        "a",
        "A",
        "a ",
        "a/",
        "a/b",
        "a.b",
        "a:b",
        "a_b",
        "a-b",
        "a%2Fb",
        "a//b",
        "ab",
        "a*",
        "a?",
        "*",
        ">",
        "a.>",
        "a.*",
    ),
    *("[ab]", "a\\*", "a%", "é", "e\u0301", "ß", "ss", "a\n", "0", "00", "{a}", "$a", "#", "~", "None"),
)
#: An offset that no earlier segment of the name has reached.
_LATE = 1_800_000_000_000_000
_LONG = 30.0  # for waits that should end at once; a slow machine must not fail them


class SegmentStoreConformance:
    """The tests that every store passes. Subclass it with one pytest fixture, ``store``.

    The fixture yields a new, empty store for each test and closes it afterwards; a test may have closed it already.

    Example:
        ```python
        class TestMyStore(SegmentStoreConformance):
            @pytest.fixture
            def store(self) -> Iterator[SegmentStore]:
                with MyStore() as store:
                    yield store
        ```
    """

    @pytest.fixture
    def store(self) -> Iterator[SegmentStore]:
        raise NotImplementedError("give the class a fixture named 'store'")

    @pytest.fixture
    def address(self, store: SegmentStore) -> str:
        """Return the address at which other processes open this store. Override it if ``store.url`` is not enough."""
        return store.url

    # create, delete, info, list

    def test_a_new_segment_is_empty(self, store: SegmentStore) -> None:
        assert store.create("s") is True
        assert store.info("s") == SegmentInfo("s", start_offset=0, length=0, sealed=False)
        assert store.read("s", 0, 10) == b""
        assert store.attributes("s") == {}

    def test_creating_what_exists_changes_nothing(self, store: SegmentStore) -> None:
        _segment(store, b"kept")
        assert store.create("s") is False
        assert store.read("s", 0, 10) == b"kept"

    def test_a_segment_that_was_never_created_is_not_found(self, store: SegmentStore) -> None:
        for call in _calls_on(store, "unknown"):
            with pytest.raises(NotFoundError, match="unknown"):
                call()
        with pytest.raises(NotFoundError):
            store.delete("unknown")
        with pytest.raises(NotFoundError):
            store.wait({"unknown": 0}, 0)

    def test_a_deleted_segment_is_not_found(self, store: SegmentStore) -> None:
        _segment(store, b"data", a=b"1")
        store.delete("s")
        for call in _calls_on(store, "s"):
            with pytest.raises(NotFoundError):
                call()
        assert list(store.list()) == []

    def test_deleting_twice_is_no_error(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        store.delete("s")
        store.delete("s")

    def test_a_sealed_segment_can_be_deleted(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        store.seal("s")
        store.delete("s")
        assert list(store.list()) == []

    def test_a_deleted_name_is_never_used_again(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        store.delete("s")
        with pytest.raises(AlreadyExistsError):
            store.create("s")
        assert list(store.list()) == []

    def test_a_forgotten_segment_is_not_found(self, store: SegmentStore) -> None:
        for is_deleted in (False, True):
            _segment(store, b"data", a=b"1")
            if is_deleted:
                store.delete("s")
            store.forget("s")
            for call in _calls_on(store, "s"):
                with pytest.raises(NotFoundError):
                    call()
            assert list(store.list()) == []
            try:
                store.create("s")
            except AlreadyExistsError:  # the store remembers all names
                return
            assert store.info("s") == SegmentInfo("s", start_offset=0, length=0, sealed=False)
            assert store.attributes("s") == {}
            assert store.append("s", b"new", expected_offset=0) == Appended(0, 3)
            assert store.read("s", 0, 10) == b"new"
            store.forget("s")

    def test_forgetting_twice_or_what_never_was_is_no_error(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        store.seal("s")
        for name in ("s", "s", "unknown"):
            store.forget(name)
        assert list(store.list()) == []

    def test_forgetting_one_segment_leaves_the_others(self, store: SegmentStore) -> None:
        for name in ("a", "a/b", "b", "c"):
            _segment(store, name.encode() * 10, name=name, tag=name.encode())
        store.forget("a")
        store.forget("b")
        assert [store.read(name, 0, 40) for name in ("a/b", "c")] == [b"a/b" * 10, b"c" * 10]
        assert [store.attributes(name) for name in ("a/b", "c")] == [{"tag": b"a/b"}, {"tag": b"c"}]
        assert list(store.list()) == ["a/b", "c"]

    def test_a_segment_is_forgotten_only_at_the_expected_offset(self, store: SegmentStore) -> None:
        _segment(store, _pattern(200_000), a=b"1")
        for offset in (0, 199_999, 200_001):
            store.forget("s", expected_offset=offset)
        assert store.append("s", b"more", expected_offset=200_000) == Appended(200_000, 200_004)
        store.forget("s", expected_offset=200_000)
        store.truncate("s", 200_001)
        store.seal("s")
        assert store.attributes("s") == {"a": b"1"}
        store.forget("s", expected_offset=200_004)
        if list(store.list()):  # the store forgets nothing on this condition
            assert store.read("s", 200_001, 10) == b"ore"
            return
        for call in _calls_on(store, "s"):
            with pytest.raises(NotFoundError):
                call()
        store.forget("s", expected_offset=200_004)
        assert store.create("s", start_offset=_LATE) is True
        store.forget("s", expected_offset=200_004)
        assert store.info("s") == SegmentInfo("s", _LATE, _LATE, sealed=False)
        assert store.attributes("s") == {}
        assert store.append("s", b"new", expected_offset=200_004) == Conflict(_LATE)
        assert store.append("s", b"new", expected_offset=_LATE) == Appended(_LATE, _LATE + 3)
        with pytest.raises(TruncatedError):
            store.read("s", 200_004, 10)
        assert store.wait({"s": 200_004}, _LONG) == {"s"}

    def test_the_name_of_a_deleted_segment_is_not_forgotten_at_an_offset(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        store.delete("s")
        store.forget("s", expected_offset=4)
        with pytest.raises(AlreadyExistsError):
            store.create("s")

    def test_a_segment_is_appended_to_or_forgotten_at_an_offset(self, store: SegmentStore) -> None:
        def append(name: str) -> Appended | None:
            with suppress(NotFoundError):
                return _appended(store.append(name, b"more", expected_offset=4))
            return None

        with ThreadPoolExecutor(3) as threads:
            for attempt in range(20):
                name = f"s/{attempt}"
                _segment(store, b"data", name=name)
                forgetting = [threads.submit(store.forget, name, expected_offset=4) for _ in range(2)]
                appended = threads.submit(append, name).result(_LONG)
                for future in forgetting:
                    future.result(_LONG)
                if appended is None:
                    assert name not in store.list()
                else:
                    assert store.read(name, 0, 10) == b"datamore"

    def test_a_late_forgetting_leaves_the_next_segment_of_the_name(self, store: SegmentStore) -> None:
        with ThreadPoolExecutor(3) as threads:
            for attempt in range(20):
                name, start = f"s/{attempt}", _LATE + attempt
                _segment(store, b"data", name=name, a=b"1")
                forgetting = [threads.submit(store.forget, name, expected_offset=4) for _ in range(3)]
                wait({*forgetting}, _LONG, FIRST_COMPLETED)
                if not store.create(name, start_offset=start):  # the store forgets nothing on this condition
                    return
                for future in forgetting:
                    future.result(_LONG)
                assert store.append(name, b"new", expected_offset=start) == Appended(start, start + 3)
                assert store.info(name) == SegmentInfo(name, start, start + 3, sealed=False)
                assert store.attributes(name) == {}
                assert name in store.list()

    def test_forgetting_many_bytes_while_others_append(self, store: SegmentStore) -> None:
        _segment(store, name="other")
        with ThreadPoolExecutor(4) as threads:
            for attempt in range(3):
                name = f"s/{attempt}"
                _segment(store, _pattern(2_000_000), name=name)
                forgetting = [threads.submit(store.forget, name) for _ in range(3)]
                for number in range(10):
                    _appended(store.append("other", b"%d" % number))
                for future in forgetting:
                    future.result(_LONG)
        assert list(store.list()) == ["other"]
        assert store.read("other", 0, 100) == b"0123456789" * 3

    def test_deleting_one_segment_leaves_the_others(self, store: SegmentStore) -> None:
        for name in "abc":
            _segment(store, name.encode() * 10, name=name, tag=name.encode())
        store.delete("b")
        assert [store.read(name, 0, 20) for name in "ac"] == [b"a" * 10, b"c" * 10]
        assert [store.attributes(name) for name in "ac"] == [{"tag": b"a"}, {"tag": b"c"}]

    @pytest.mark.parametrize("name", ["", "x" * (MAX_NAME_LENGTH + 1), "nul\0", "half \ud83d"])
    def test_a_name_that_cannot_be_one_is_refused(self, store: SegmentStore, name: str) -> None:
        with pytest.raises(InvalidArgumentError):
            store.create(name)
        _segment(store)
        with pytest.raises(InvalidArgumentError):
            store.append("s", b"", attributes={name: AttributeChange(None, b"1")})
        assert store.attributes("s") == {}

    @pytest.mark.parametrize(
        "name", ["a b", "a/b/0", "%", "_", "'", '"', "\\", "?", "*", "ü", "日本", "😀", "x" * MAX_NAME_LENGTH]
    )
    def test_a_name_may_hold_any_character(self, store: SegmentStore, name: str) -> None:
        _segment(store, b"data", name=name)
        assert store.append(name, b"", attributes={name: AttributeChange(None, b"1")}) == Appended(4, 4)
        assert list(store.list()) == [name]
        assert store.attributes(name, name) == {name: b"1"}
        assert store.info(name).name == name

    def test_names_are_listed_in_order_of_their_code_points(self, store: SegmentStore) -> None:
        names = ["b", "a", "B", "ab", "a/1", "a/0", "é", "z", "\ufffd", "😀", "a%", "a_"]
        for name in names:
            store.create(name)
        assert list(store.list()) == sorted(names)

    @pytest.mark.parametrize(
        "prefix",
        ["a", "a/", "a%", "a_", "%", "_", "é", "日", "😀", "ab", "none", "a*", "*", "?", "[ab]", "\\", "a.", ">"],
    )
    def test_only_names_with_the_prefix_are_listed(self, store: SegmentStore, prefix: str) -> None:
        names = ["a", "a/0", "a/1", "a%", "a%b", "a_", "ab", "aXb", "b", "A", "é", "ée", "e", "日本", "日", "😀", "😀!"]
        names += ["a*", "*", "?", "[ab]", "\\*", "a.b", ">"]
        for name in names:
            store.create(name)
        assert list(store.list(prefix)) == sorted(name for name in names if name.startswith(prefix))

    def test_a_prefix_that_no_name_can_have_is_refused(self, store: SegmentStore) -> None:
        _segment(store)
        for call in (lambda: store.list("half \ud83d"), lambda: store.attributes("s", "half \ud83d")):
            with pytest.raises(InvalidArgumentError):
                call()

    def test_many_names_are_listed(self, store: SegmentStore) -> None:
        names = [f"n/{number:05}" for number in range(2100)]
        for name in names:
            store.create(name)
        assert list(store.list("n/")) == names

    def test_names_that_look_alike_are_different_segments(self, store: SegmentStore) -> None:
        for number, name in enumerate(_LOOK_ALIKES):
            assert store.create(name) is True
            _segment(store, b"%d" % number, name=name, tag=name.encode())
        assert list(store.list()) == sorted(_LOOK_ALIKES)
        for number, name in enumerate(_LOOK_ALIKES):
            assert store.read(name, 0, 100) == b"%d" % number
            assert store.attributes(name) == {"tag": name.encode()}

    def test_what_is_done_to_a_segment_is_not_done_to_those_that_look_alike(self, store: SegmentStore) -> None:
        for name in _LOOK_ALIKES:
            _segment(store, b"data", name=name, tag=b"1")
        store.truncate("a", 4)
        store.seal("*")
        store.delete("a*")
        assert list(store.list()) == sorted(set(_LOOK_ALIKES) - {"a*"})
        for name in set(_LOOK_ALIKES) - {"a", "*", "a*"}:
            assert store.read(name, 0, 100) == b"data"
            assert store.append(name, b"more", attributes={"tag": AttributeChange(b"1", b"2")}) == Appended(4, 8)

    def test_segment_and_attribute_are_two_names(self, store: SegmentStore) -> None:
        for separator in "/:.-_|":
            first, second = f"x{separator}y", f"y{separator}z"
            _segment(store, b"", name=f"{separator}x", attributes={second: b"1"})
            _segment(store, b"", name=f"{separator}{first}", attributes={"z": b"2"})
            assert store.attributes(f"{separator}x") == {second: b"1"}
            assert store.attributes(f"{separator}{first}") == {"z": b"2"}

    def test_of_many_that_create_a_segment_one_has_created_it(self, store: SegmentStore) -> None:
        with ThreadPoolExecutor(4) as threads:
            for attempt in range(10):
                created = list(threads.map(store.create, [f"s/{attempt}"] * 4))
                assert sorted(created) == [False, False, False, True]

    # create_together

    def test_segments_are_created_together_with_their_first_bytes(self, store: SegmentStore) -> None:
        segments = {"s": b"first", "empty": b"", "a/b": _pattern(60_000)}
        if not store.guarantees.atomic_multi_create:
            with pytest.raises(InvalidArgumentError):
                store.create_together(segments)
            return
        assert store.create_together(segments) is True
        assert store.create_together({}) is True
        for name, data in segments.items():
            assert store.info(name) == SegmentInfo(name, start_offset=0, length=len(data), sealed=False)
            assert store.read(name, 0, 1 << 20) == data
            assert store.attributes(name) == {}
        assert list(store.list()) == ["a/b", "empty", "s"]
        changes = {"a": AttributeChange(None, b"1")}
        assert store.append("s", b"!", expected_offset=5, attributes=changes) == Appended(5, 6)
        assert store.append("empty", b"x") == Appended(0, 1)
        assert store.read("s", 0, 10) == b"first!"

    def test_segments_that_are_created_together_begin_where_asked_for(self, store: SegmentStore) -> None:
        if not store.guarantees.atomic_multi_create:
            return
        segments = {"s": b"first", "empty": b"", "other": b"other"}
        assert store.create_together(segments, start_offsets={"s": _LATE, "empty": _LATE + 1}) is True
        assert store.info("s") == SegmentInfo("s", _LATE, _LATE + 5, sealed=False)
        assert store.info("empty") == SegmentInfo("empty", _LATE + 1, _LATE + 1, sealed=False)
        assert store.info("other") == SegmentInfo("other", 0, 5, sealed=False)
        assert store.read("s", _LATE, 10) == b"first"
        assert store.append("s", b"lost", expected_offset=5) == Conflict(_LATE + 5)
        assert store.append("s", b"lost", expected_offset=_LATE) == Conflict(_LATE + 5, b"first")
        assert store.append("s", b"!", expected_offset=_LATE + 5) == Appended(_LATE + 5, _LATE + 6)
        assert store.append("empty", b"x") == Appended(_LATE + 1, _LATE + 2)
        store.truncate("s", _LATE + 2)
        assert store.read("s", _LATE + 2, 10) == b"rst!"
        for wrong in ({"s": -1}, {"s": "5"}, {"unknown": 5}, {"s": 2**53 + 1}, ["s"]):
            with pytest.raises(InvalidArgumentError):
                store.create_together({"s": b""}, start_offsets=wrong)  # type: ignore[arg-type]

    def test_one_segment_that_cannot_be_created_prevents_them_all(self, store: SegmentStore) -> None:
        if not store.guarantees.atomic_multi_create:
            return
        for name in ("there", "gone"):
            _segment(store, b"kept", name=name)
        store.delete("gone")
        for others in (["new"], ["a", "z"]):
            segments = dict.fromkeys([*others, "there"], b"lost")
            for order in (segments, dict(reversed(segments.items()))):
                assert store.create_together(order) is False
                with pytest.raises(AlreadyExistsError):
                    store.create_together({**order, "gone": b""})
            with pytest.raises(AlreadyExistsError):
                store.create_together(dict.fromkeys(["gone", *others], b""))
        assert list(store.list()) == ["there"]
        assert store.read("there", 0, 10) == b"kept"

    def test_of_many_that_create_segments_together_one_has_created_them(self, store: SegmentStore) -> None:
        if not store.guarantees.atomic_multi_create:
            return
        with ThreadPoolExecutor(4) as threads:
            for attempt in range(10):
                names = [f"s/{attempt}/{number}" for number in range(5)]

                def race(thread: int, names: list[str] = names) -> bool:
                    return store.create_together(dict.fromkeys(names if thread % 2 else names[::-1], b"%d" % thread))

                created = list(threads.map(race, range(4)))
                assert sorted(created) == [False, False, False, True]
                assert [store.read(name, 0, 2) for name in names] == [b"%d" % created.index(True)] * 5

    def test_as_many_segments_as_may_be_are_created_together_and_no_more(self, store: SegmentStore) -> None:
        if not store.guarantees.atomic_multi_create:
            return
        size = MAX_CREATED_BYTES // MAX_CREATED
        segments = {f"s/{number:03}": bytes([number % 256]) * size for number in range(MAX_CREATED)}
        for more in ({"t": b""}, {"s/000": bytes(MAX_CREATED_BYTES)}):
            with pytest.raises(InvalidArgumentError):
                store.create_together({**segments, **more})
        assert list(store.list()) == []
        assert store.create_together(segments) is True
        assert list(store.list()) == sorted(segments)
        assert all(store.read(name, 0, 2 * size) == data for name, data in segments.items())

    def test_a_forgotten_segment_can_be_created_together_with_others(self, store: SegmentStore) -> None:
        if not store.guarantees.atomic_multi_create:
            return
        _segment(store, b"before")
        store.forget("s")
        try:
            assert store.create_together({"s": b"new", "t": b""}) is True
        except AlreadyExistsError:  # the store remembers all names
            return
        assert store.read("s", 0, 10) == b"new"

    # append

    def test_appends_follow_one_another(self, store: SegmentStore) -> None:
        _segment(store)
        assert store.append("s", b"one") == Appended(0, 3)
        assert store.append("s", b"two!", expected_offset=3) == Appended(3, 7)
        assert store.read("s", 0, 100) == b"onetwo!"
        assert store.info("s").length == 7

    def test_an_append_at_another_offset_than_expected_writes_nothing(self, store: SegmentStore) -> None:
        _segment(store, b"0123456789", a=b"1")
        for expected_offset, delta in ((0, b"0123456789"), (4, b"456789"), (11, b"")):
            result = store.append(
                "s", b"lost", expected_offset=expected_offset, attributes={"a": AttributeChange(b"1", b"2")}
            )
            assert result == Conflict(10, delta, {"a": b"1"})
        assert store.read("s", 0, 100) == b"0123456789"
        assert store.attributes("s") == {"a": b"1"}

    def test_an_append_of_what_nobody_reads_yet_is_as_any_other(self, store: SegmentStore) -> None:
        _segment(store)
        assert store.append_unread("s", b"one") == Appended(0, 3)
        assert store.append_unread("s", b"two!", expected_offset=3) == Appended(3, 7)
        assert store.append_unread("s", b"lost", expected_offset=3) == Conflict(7, b"two!")
        assert store.append("s", b"!", expected_offset=7) == Appended(7, 8)
        assert store.read("s", 0, 100) == b"onetwo!!"
        store.seal("s")
        with pytest.raises(SealedError):
            store.append_unread("s", b"late")
        with pytest.raises(NotFoundError):
            store.append_unread("unknown", b"x")

    def test_an_append_that_need_not_be_flushed_is_as_any_other(self, store: SegmentStore) -> None:
        _segment(store)
        assert store.append_unflushed("s", b"one", attributes={"a": AttributeChange(None, b"1")}) == Appended(0, 3)
        assert store.wait({"s": 0}, 0) == {"s"}
        lost = store.append_unflushed("s", b"lost", attributes={"a": AttributeChange(b"0", b"2")})
        assert lost == Conflict(3, b"", {"a": b"1"})
        assert store.append("s", b"two!", expected_offset=3) == Appended(3, 7)
        assert store.append_unflushed("s", b"lost", expected_offset=3) == Conflict(7, b"two!")
        last = store.append_unflushed("s", b"!", expected_offset=7, attributes={"a": AttributeChange(b"1", None)})
        assert last == Appended(7, 8)
        assert store.read("s", 0, 100) == b"onetwo!!"
        assert store.attributes("s") == {}
        store.seal("s")
        with pytest.raises(SealedError):
            store.append_unflushed("s", b"late")
        with pytest.raises(NotFoundError):
            store.append_unflushed("unknown", b"x")

    def test_a_conflict_holds_the_first_bytes_that_were_not_seen(self, store: SegmentStore) -> None:
        data = _pattern(3 * MAX_DELTA_BYTES)
        _segment(store, data[:1000])
        store.append("s", data[1000:])
        result = store.append("s", b"lost", expected_offset=500)
        assert result == Conflict(len(data), data[500 : 500 + MAX_DELTA_BYTES])

    def test_a_conflict_about_truncated_bytes_has_no_delta(self, store: SegmentStore) -> None:
        _segment(store, b"0123456789")
        store.truncate("s", 6)
        assert store.append("s", b"lost", expected_offset=5) == Conflict(10)
        assert store.append("s", b"lost", expected_offset=6) == Conflict(10, b"6789")

    def test_a_conflict_without_an_expected_offset_has_no_delta(self, store: SegmentStore) -> None:
        _segment(store, b"0123456789", a=b"1")
        result = store.append("s", b"lost", attributes={"a": AttributeChange(b"0", b"2")})
        assert result == Conflict(10, b"", {"a": b"1"})

    def test_an_empty_append_is_an_append(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        assert store.append("s", b"") == Appended(4, 4)
        assert store.append("s", b"", expected_offset=4) == Appended(4, 4)
        assert store.append("s", b"", expected_offset=3) == Conflict(4, b"a")

    def test_the_largest_append_is_taken_whole(self, store: SegmentStore) -> None:
        data = _pattern(MAX_APPEND_BYTES)
        _segment(store, b"before")
        assert store.append("s", data, expected_offset=6) == Appended(6, 6 + len(data))
        assert store.read("s", 6, 2 * len(data)) == data

    def test_a_larger_append_is_refused(self, store: SegmentStore) -> None:
        _segment(store)
        with pytest.raises(InvalidArgumentError):
            store.append("s", bytes(MAX_APPEND_BYTES + 1))
        assert store.info("s").length == 0

    @pytest.mark.parametrize("wrong", ["5", b"5", True, 1.0, math.nan, None, -1])
    def test_what_is_no_offset_is_refused_and_nothing_is_changed(self, store: SegmentStore, wrong: Any) -> None:
        store.create("s")
        store.append("s", b"0123456789")
        calls: list[Callable[[], object]] = [
            lambda: store.read("s", wrong, 10),
            lambda: store.read("s", 0, wrong),
            lambda: store.truncate("s", wrong),
            lambda: store.truncate("missing", wrong),
        ]
        if wrong is not None:
            calls.append(lambda: store.append("s", b"x", expected_offset=wrong))
            calls.append(lambda: store.append_unread("s", b"x", expected_offset=wrong))
            calls.append(lambda: store.append_unflushed("s", b"x", expected_offset=wrong))
            calls.append(lambda: store.append_together([Append("s", b"x", wrong)]))
        if wrong != -1:
            calls.append(lambda: store.wait({"s": wrong}, 0))
        for call in calls:
            with pytest.raises(InvalidArgumentError):
                call()
        assert store.info("s") == SegmentInfo("s", 0, 10, sealed=False)

    @pytest.mark.parametrize("wrong", ["5", True, math.nan, None])
    def test_what_is_no_timeout_is_refused(self, store: SegmentStore, wrong: Any) -> None:
        store.create("s")
        with pytest.raises(InvalidArgumentError):
            store.wait({"s": 0}, wrong)
        if store.guarantees.fair_lock:
            for timeouts in ((wrong,), (1.0, wrong)):
                with pytest.raises(InvalidArgumentError), store.fair_lock("s", *timeouts):
                    pass

    def test_what_is_of_a_wrong_type_is_refused_and_nothing_is_changed(self, store: SegmentStore) -> None:
        _segment(store)
        no_name: list[Any] = [5, 0, b"s", [], ["s"], {}, object(), str]
        no_mapping: list[Any] = [5, 0, "", "s", b"", [], ["s"], object(), dict]
        no_sequence: list[Any] = [5, 0, object(), {"s": 5}, [5], ["s"], None, list]
        calls: list[tuple[Callable[[Any], object], list[Any]]] = [
            (store.create, [*no_name, None]),
            (store.delete, [*no_name, None]),
            (store.forget, [*no_name, None]),
            (lambda wrong: store.forget("s", expected_offset=wrong), ["5", -1, 0.5, True, []]),
            (lambda wrong: store.create("new", start_offset=wrong), ["5", -1, 0.5, True, [], None, 2**53 + 1]),
            (store.info, [*no_name, None]),
            (store.seal, [*no_name, None]),
            (lambda wrong: next(store.list(wrong), None), [*no_name, None]),
            (lambda wrong: store.append(wrong, b"data"), [*no_name, None]),
            (lambda wrong: store.append("s", wrong), [5, 0, "", "data", [], [1], object(), bytes, None]),
            (lambda wrong: store.append("s", b"data", expected_offset=wrong), ["5", 0.0, True, [], object(), int]),
            (lambda wrong: store.append("s", b"data", attributes=wrong), [*no_mapping, {5: 5}, {"a": b"1"}]),
            (lambda wrong: store.append_unread("s", wrong), [5, 0, "", "data", [], [1], object(), bytes, None]),
            (lambda wrong: store.append_unflushed("s", wrong), [5, 0, "", "data", [], [1], object(), bytes, None]),
            (lambda wrong: store.append_unflushed("s", b"x", attributes=wrong), [*no_mapping, {5: 5}, {"a": b"1"}]),
            (lambda wrong: store.read(wrong, 0, 1), [*no_name, None]),
            (lambda wrong: store.read("s", 0, wrong), ["5", 0.5, True, [], object(), int, None]),
            (lambda wrong: store.infos(wrong), [5, 0, "", "s", object(), [5], [None], list]),
            (lambda wrong: store.read_starts(wrong, 1), [5, 0, "", "s", object(), [5], [None], list]),
            (lambda wrong: store.read_starts(["s"], wrong), ["5", 0, -1, 0.5, True, [], object(), int, None]),
            (lambda wrong: store.truncate(wrong, 0), [*no_name, None]),
            (store.attributes, [*no_name, None]),
            (lambda wrong: store.attributes("s", wrong), [*no_name, None]),
            (lambda wrong: store.attributes("s", names=wrong), [5, 0, "", "s", object(), [5], [None], list]),
            (lambda wrong: store.wait(wrong, 0.0), [*no_mapping, {5: 5}, {"s": "5"}, None]),
        ]
        if store.guarantees.atomic_multi_append:
            calls.append((store.append_together, no_sequence))
        if store.guarantees.atomic_multi_create:
            calls.append((store.create_together, [*no_mapping, {5: b""}, {"a": 5}, {"a": None}, {"": b""}, None]))
        if store.guarantees.server_side_copy:
            calls.append((lambda wrong: store.concat("s", wrong), [*no_name, None]))
            calls.append((store.copy_segments, no_sequence))
        for call, wrongs in calls:
            for wrong in wrongs:
                with pytest.raises(InvalidArgumentError):
                    raise AssertionError(f"{call} takes {wrong!r} and returns {call(wrong)!r}")
        assert [*store.list()] == ["s"]
        assert store.info("s") == SegmentInfo("s", 0, 0, sealed=False)
        assert store.attributes("s") == {}

    def test_a_negative_expected_offset_is_refused(self, store: SegmentStore) -> None:
        _segment(store)
        with pytest.raises(InvalidArgumentError):
            store.append("s", b"data", expected_offset=-1)
        assert store.info("s").length == 0

    def test_a_large_append_is_seen_whole_or_not_at_all(self, store: SegmentStore) -> None:
        size, count = 2_000_003, 6
        data = _pattern(size)
        _segment(store)

        def append_all() -> None:
            for number in range(count):
                assert store.append("s", data, expected_offset=number * size) == Appended(
                    number * size, size * (number + 1)
                )

        with ThreadPoolExecutor(1) as threads:
            appending = threads.submit(append_all)
            while not appending.done():
                length = store.info("s").length
                assert length % size == 0
                if length:
                    assert store.read("s", length - size, size) == data
                conflict = store.append("s", b"", expected_offset=length + 1)
                assert isinstance(conflict, Conflict)
                assert conflict.length % size == 0
            appending.result()
        assert store.read("s", 0, count * size) == data * count

    def test_data_and_attributes_are_seen_together(self, store: SegmentStore) -> None:
        _segment(store, number=b"0")

        def append_all() -> None:
            for number in range(100):
                change = AttributeChange(b"%d" % number, b"%d" % (number + 1))
                store.append("s", b"12345678", attributes={"number": change})

        with ThreadPoolExecutor(1) as threads:
            appending = threads.submit(append_all)
            while not appending.done():
                length = store.info("s").length
                number = int(store.attributes("s")["number"])
                assert length <= 8 * number <= store.info("s").length
            appending.result()

    # attributes

    def test_attributes_are_set_with_the_append(self, store: SegmentStore) -> None:
        _segment(store)
        store.append("s", b"data", attributes={"a": AttributeChange(None, b"1"), "b": AttributeChange(ANY, b"")})
        assert store.attributes("s") == {"a": b"1", "b": b""}

    def test_an_attribute_changes_if_it_is_what_was_expected(self, store: SegmentStore) -> None:
        _segment(store, a=b"1")
        assert store.append("s", b"", attributes={"a": AttributeChange(b"1", b"2")}) == Appended(0, 0)
        assert store.append("s", b"", attributes={"a": AttributeChange(b"1", b"3")}) == Conflict(0, b"", {"a": b"2"})
        assert store.append("s", b"", attributes={"a": AttributeChange(None, b"3")}) == Conflict(0, b"", {"a": b"2"})
        assert store.append("s", b"", attributes={"b": AttributeChange(b"1", b"3")}) == Conflict(0, b"", {"b": None})
        assert store.attributes("s") == {"a": b"2"}

    def test_values_are_compared_byte_by_byte(self, store: SegmentStore) -> None:
        values = [
            b"",
            b"1",
            b"01",
            b"1.0",
            b" 1",
            b"1 ",
            b"1\0",
            b"1\0\1",
            b"1\0\2",
            b"a",
            b"A",
            b"\xff",
            b"\xfe",
            b"None",
        ]
        _segment(store)
        for value in values:
            store.append("s", b"", attributes={"a": AttributeChange(ANY, value)})
            for other in [*values, None]:
                if other != value:
                    result = store.append("s", b"", attributes={"a": AttributeChange(other, b"lost")})
                    assert result == Conflict(0, b"", {"a": value})
            assert store.append("s", b"", attributes={"a": AttributeChange(value, value)}) == Appended(0, 0)

    def test_an_empty_attribute_is_not_an_absent_one(self, store: SegmentStore) -> None:
        _segment(store, a=b"")
        for name, value, wrong in (("a", b"", None), ("none", None, b"")):
            result = store.append("s", b"x", attributes={name: AttributeChange(wrong, b"1")})
            assert result == Conflict(0, b"", {name: value})
        assert store.attributes("s") == {"a": b""}

    def test_any_value_may_be_expected(self, store: SegmentStore) -> None:
        _segment(store)
        for value in (b"1", b"2", None, b"3"):
            store.append("s", b"", attributes={"a": AttributeChange(ANY, value)})
            assert store.attributes("s").get("a") == value

    def test_an_attribute_can_be_removed(self, store: SegmentStore) -> None:
        _segment(store, a=b"1", b=b"2")
        assert store.append("s", b"", attributes={"a": AttributeChange(b"1", None)}) == Appended(0, 0)
        assert store.attributes("s") == {"b": b"2"}
        store.append("s", b"", attributes={"a": AttributeChange(None, None)})
        assert store.attributes("s") == {"b": b"2"}

    def test_removing_what_is_not_there_is_no_error(self, store: SegmentStore) -> None:
        _segment(store)
        assert store.append("s", b"x", attributes={"a": AttributeChange(ANY, None)}) == Appended(0, 1)
        assert store.attributes("s") == {}

    def test_attributes_that_were_read_stay_as_they_were(self, store: SegmentStore) -> None:
        _segment(store, a=b"1")
        seen, conflict = store.attributes("s"), store.append("s", b"", attributes={"a": AttributeChange(b"0", b"9")})
        store.append("s", b"", attributes={"a": AttributeChange(b"1", b"2"), "b": AttributeChange(None, b"3")})
        assert seen == {"a": b"1"}
        assert conflict == Conflict(0, b"", {"a": b"1"})

    def test_an_expectation_without_a_change_is_a_comparison(self, store: SegmentStore) -> None:
        _segment(store, a=b"1")
        same = AttributeChange(b"1", b"1")
        assert store.append("s", b"data", attributes={"a": same}) == Appended(0, 4)
        store.append("s", b"", attributes={"a": AttributeChange(ANY, b"2")})
        assert store.append("s", b"data", attributes={"a": same}) == Conflict(4, b"", {"a": b"2"})

    def test_one_unexpected_attribute_prevents_everything(self, store: SegmentStore) -> None:
        _segment(store, b"data", a=b"1", b=b"2", c=b"3")
        changes = {
            "a": AttributeChange(b"1", b"x"),
            "b": AttributeChange(b"wrong", b"x"),
            "c": AttributeChange(ANY, None),
        }
        result = store.append("s", b"lost", expected_offset=4, attributes=changes)
        assert result == Conflict(4, b"", {"a": b"1", "b": b"2", "c": b"3"})
        assert store.read("s", 0, 100) == b"data"
        assert store.attributes("s") == {"a": b"1", "b": b"2", "c": b"3"}

    @pytest.mark.parametrize("prefix", ["", "a", "a/", "a%", "_", "ü", "none", "a*", "*", "[ab]", "A"])
    def test_attributes_are_found_by_prefix(self, store: SegmentStore, prefix: str) -> None:
        names = ["a", "a/1", "a/2", "a%", "aX", "_", "b", "ü", "üb", "A", "a*", "a*b", "*"]
        _segment(store, attributes={name: name.encode() for name in names})
        expected = {name: name.encode() for name in names if name.startswith(prefix)}
        assert store.attributes("s", prefix) == expected

    @pytest.mark.parametrize("names", [[], ["a"], ["none"], ("b", "a/2", "none", "b", "ü"), frozenset(["_", "aX"])])
    def test_attributes_are_found_by_name(self, store: SegmentStore, names: Collection[str]) -> None:
        present = ["a", "a/1", "a/2", "aX", "_", "b", "ü"]
        _segment(store, attributes={name: name.encode() for name in present})
        expected = {name: name.encode() for name in present if name in names}
        assert store.attributes("s", names=names) == expected
        assert store.attributes("s", "a/", names=names) == {
            name: value for name, value in expected.items() if name.startswith("a/")
        }

    def test_many_attributes_are_found_by_name(self, store: SegmentStore) -> None:
        values = {f"reader/{number}": b"%d" % number for number in range(2_000)}
        _segment(store)
        for first in range(0, 2_000, MAX_ATTRIBUTE_CHANGES):
            portion = list(values)[first : first + MAX_ATTRIBUTE_CHANGES]
            store.append("s", b"", attributes={name: AttributeChange(None, values[name]) for name in portion})
        assert store.attributes("s", names=values.keys()) == values

    def test_a_name_that_no_attribute_can_have_is_refused(self, store: SegmentStore) -> None:
        _segment(store)
        for names in (["a", ""], ["x" * (MAX_NAME_LENGTH + 1)], ["half \ud83d"], "one name"):
            with pytest.raises(InvalidArgumentError):
                store.attributes("s", names=names)

    def test_an_attribute_holds_any_bytes(self, store: SegmentStore) -> None:
        values = {"empty": b"", "zeros": b"\0\0", "all": bytes(range(256)), "large": bytes(70_000)}
        _segment(store, attributes=values)
        assert store.attributes("s") == values

    def test_the_largest_append_changes_as_many_attributes_as_are_allowed(self, store: SegmentStore) -> None:
        data = _pattern(MAX_APPEND_BYTES)
        values = {f"{number}": b"%d" % number for number in range(MAX_ATTRIBUTE_CHANGES)}
        _segment(store)
        changes = {name: AttributeChange(None, value) for name, value in values.items()}
        assert store.append("s", data, expected_offset=0, attributes=changes) == Appended(0, len(data))
        assert store.attributes("s") == values
        assert store.read("s", 0, len(data)) == data
        too_many = {f"{number}": AttributeChange(ANY, None) for number in range(MAX_ATTRIBUTE_CHANGES + 1)}
        with pytest.raises(InvalidArgumentError, match="attributes"):
            store.append("s", b"", attributes=too_many)
        assert store.attributes("s") == values

    def test_attributes_are_all_of_one_moment(self, store: SegmentStore) -> None:
        _segment(store, a=b"0", b=b"0")

        def change_both() -> None:
            for number in range(100):
                value = b"%d" % number
                store.append("s", b"", attributes={"a": AttributeChange(ANY, value), "b": AttributeChange(ANY, value)})

        with ThreadPoolExecutor() as threads:
            changing = threads.submit(change_both)
            while not changing.done():
                for seen in (store.attributes("s"), store.attributes("s", names=["a", "b"])):
                    assert seen["a"] == seen["b"]
            changing.result()

    # read

    def test_a_read_returns_as_many_bytes_as_are_there(self, store: SegmentStore) -> None:
        _segment(store, b"0123")
        store.append("s", b"456789")
        for offset in range(11):
            for max_bytes in (1, 2, 5, 10, 1 << 40):
                assert store.read("s", offset, max_bytes) == b"0123456789"[offset : offset + max_bytes]

    def test_a_read_may_begin_and_end_anywhere_in_large_appends(self, store: SegmentStore) -> None:
        data = _pattern(500_000)
        _segment(store)
        for first, end in ((0, 65_536), (65_536, 65_537), (65_537, 300_000), (300_000, 500_000)):
            store.append("s", data[first:end])
        edges = (0, 1, 65_535, 65_536, 65_537, 65_538, 131_072, 299_999, 300_000, 365_536, 499_999, 500_000)
        for offset in edges:
            for max_bytes in (1, 2, 65_535, 65_536, 65_537, 500_000):
                assert store.read("s", offset, max_bytes) == data[offset : offset + max_bytes]

    def test_many_small_appends_are_read_in_one_piece(self, store: SegmentStore) -> None:
        _segment(store)
        records = [b"%06d;" % number for number in range(1_100)]
        for record in records:
            store.append("s", record)
        data = b"".join(records)
        assert store.read("s", 0, 1 << 20) == data
        assert store.read("s", 10, len(data) - 11) == data[10:-1]
        assert store.append("s", b"lost", expected_offset=0) == Conflict(len(data), data)
        store.truncate("s", 3_503)
        assert store.read("s", 3_503, 1 << 20) == data[3_503:]

    def test_many_segments_are_asked_for_at_once(self, store: SegmentStore) -> None:
        names = [*_many_segments(store), "large", "cut", "empty", "sealed"]
        _segment(store, b"whole", name="sealed")
        store.seal("sealed")
        assert store.infos([*names, "gone", "unknown"]) == {name: store.info(name) for name in names}
        _appended(store.append("empty", b"no more"))
        assert store.infos({"empty": 0}) == {"empty": SegmentInfo("empty", 0, 7, sealed=False)}
        assert store.infos([]) == {}

    def test_the_starts_of_many_segments_are_read_at_once(self, store: SegmentStore) -> None:
        expected = _many_segments(store) | {"large": _pattern(300_000)[:1000], "empty": b""}
        store.create("late", start_offset=_LATE)
        store.create("late and empty", start_offset=_LATE)
        _appended(store.append("late", b"data"))
        starts = {name: SegmentStart(0, data) for name, data in expected.items()}
        starts |= {"cut": SegmentStart(3, b"3456789"), "late": SegmentStart(_LATE, b"data")}
        starts["late and empty"] = SegmentStart(_LATE, b"")
        found = store.read_starts([*starts, "gone", "unknown"], 1000)
        assert found.items() <= starts.items()
        found = store.read_starts({"s/1": 0, "large": 1}, 2)
        assert found.items() <= {"s/1": (0, b"11"), "large": (0, _pattern(300_000)[:2])}.items()
        assert store.read_starts([], 1) == {}
        store.truncate("large", 100_000)
        found = store.read_starts(["large"], 2)
        assert found.items() <= {"large": (100_000, _pattern(300_000)[100_000:100_002])}.items()

    def test_a_read_beyond_the_end_is_refused(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        for offset in (5, -1):
            with pytest.raises(InvalidArgumentError):
                store.read("s", offset, 1)

    @pytest.mark.parametrize("max_bytes", [0, -1])
    def test_a_read_of_nothing_is_refused(self, store: SegmentStore, max_bytes: int) -> None:
        _segment(store, b"data")
        with pytest.raises(InvalidArgumentError):
            store.read("s", 0, max_bytes)

    # truncate

    def test_truncated_bytes_are_gone_and_offsets_stay(self, store: SegmentStore) -> None:
        _segment(store, b"0123456789")
        store.truncate("s", 4)
        assert store.info("s") == SegmentInfo("s", start_offset=4, length=10, sealed=False)
        assert store.read("s", 4, 3) == b"456"
        for offset in (0, 3):
            with pytest.raises(TruncatedError) as error:
                store.read("s", offset, 1)
            assert error.value.start_offset == 4
        assert store.append("s", b"ab", expected_offset=10) == Appended(10, 12)
        assert store.read("s", 4, 100) == b"456789ab"

    def test_truncating_before_the_start_changes_nothing(self, store: SegmentStore) -> None:
        _segment(store, b"0123456789")
        store.truncate("s", 6)
        store.truncate("s", 3)
        store.truncate("s", 6)
        assert store.info("s").start_offset == 6
        assert store.read("s", 6, 100) == b"6789"

    def test_everything_can_be_truncated(self, store: SegmentStore) -> None:
        _segment(store, b"0123456789", a=b"1")
        store.truncate("s", 10)
        assert store.info("s") == SegmentInfo("s", start_offset=10, length=10, sealed=False)
        assert store.read("s", 10, 1) == b""
        assert store.attributes("s") == {"a": b"1"}
        assert store.append("s", b"more", expected_offset=10) == Appended(10, 14)
        assert store.read("s", 10, 100) == b"more"

    @pytest.mark.parametrize("offset", [-1, 11])
    def test_truncating_outside_the_segment_is_refused(self, store: SegmentStore, offset: int) -> None:
        _segment(store, b"0123456789")
        with pytest.raises(InvalidArgumentError):
            store.truncate("s", offset)
        assert store.info("s").start_offset == 0

    def test_large_segments_are_truncated_at_any_byte(self, store: SegmentStore) -> None:
        data = _pattern(300_000)
        _segment(store)
        for first in range(0, len(data), 100_000):
            store.append("s", data[first : first + 100_000])
        for offset in (1, 65_535, 65_536, 65_537, 99_999, 100_000, 170_000, 299_999, 300_000):
            store.truncate("s", offset)
            assert store.info("s").start_offset == offset
            assert store.read("s", offset, len(data)) == data[offset:]

    def test_a_read_during_truncations_is_whole_or_refused(self, store: SegmentStore) -> None:
        _segment(store, b"%08d" % 0)

        def append_and_truncate() -> None:
            for number in range(1, 200):
                store.append("s", b"%08d" % number)
                store.truncate("s", number * 8)

        with ThreadPoolExecutor() as threads:
            truncating = threads.submit(append_and_truncate)
            while not truncating.done():
                start = store.info("s").start_offset
                try:
                    data = store.read("s", start, 8)
                except TruncatedError as error:
                    assert error.start_offset > start
                else:
                    assert data == b"%08d" % (start // 8)
            truncating.result()

    def test_a_sealed_segment_can_be_truncated(self, store: SegmentStore) -> None:
        _segment(store, b"0123456789")
        store.seal("s")
        store.truncate("s", 10)
        assert store.info("s") == SegmentInfo("s", start_offset=10, length=10, sealed=True)

    # seal

    def test_a_sealed_segment_refuses_every_append(self, store: SegmentStore) -> None:
        _segment(store, b"data", a=b"1")
        store.seal("s")
        for expected_offset in (None, 4, 0):
            for data in (b"", b"more"):
                for changes in (None, {"a": AttributeChange(b"1", b"2")}, {"a": AttributeChange(b"wrong", b"2")}):
                    with pytest.raises(SealedError):
                        store.append("s", data, expected_offset=expected_offset, attributes=changes)
        assert store.read("s", 0, 100) == b"data"
        assert store.attributes("s") == {"a": b"1"}

    def test_sealing_returns_the_final_info_each_time(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        final = SegmentInfo("s", start_offset=0, length=4, sealed=True)
        assert [store.seal("s"), store.seal("s"), store.info("s")] == [final] * 3

    def test_nothing_is_appended_after_the_seal_was_acknowledged(self, store: SegmentStore) -> None:
        _segment(store)

        def append_until_sealed() -> int:
            for count in range(1_000_000):
                try:
                    store.append("s", b"x")
                except SealedError:
                    return count
            raise AssertionError("the segment was never sealed")

        with ThreadPoolExecutor() as threads:
            appending = [threads.submit(append_until_sealed) for _ in range(4)]
            _until(lambda: store.info("s").length > 10)
            final = store.seal("s")
            assert sum(future.result(_LONG) for future in appending) == final.length
        assert store.info("s") == final

    # wait

    def test_a_wait_for_what_has_changed_returns_at_once(self, store: SegmentStore) -> None:
        for name in "abc":
            _segment(store, b"data", name=name)
        assert store.wait({"a": 4, "b": 3, "c": 0}, _LONG) == {"b", "c"}
        assert store.wait({"a": 4, "b": 3, "c": 0}, 0) == {"b", "c"}

    def test_a_sealed_or_deleted_segment_has_changed(self, store: SegmentStore) -> None:
        for name in "abc":
            _segment(store, b"data", name=name)
        store.seal("a")
        store.delete("b")
        known = {"a": 4, "b": 4, "c": 4}
        assert store.wait(known, _LONG) == {"a", "b"}

    def test_a_segment_shorter_than_was_known_has_changed(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        assert store.wait({"s": 5}, _LONG) == {"s"}

    def test_a_wait_for_nothing_ends_at_its_timeout(self, store: SegmentStore) -> None:
        for timeout in (0.0, 0.05):
            assert store.wait({}, timeout) == frozenset()

    def test_truncating_is_no_change_and_hides_none(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        store.truncate("s", 4)
        assert store.wait({"s": 4}, 0) == frozenset()
        with ThreadPoolExecutor(1) as threads:
            (waiting,) = _started(threads, 1, lambda: store.wait({"s": 4}, _LONG))
            store.append("s", b"more")
            store.truncate("s", 8)
            assert waiting.result(_LONG) == {"s"}
        assert store.wait({"s": 4}, _LONG) == {"s"}

    def test_a_wait_that_begins_beside_an_append_hears_it(self, store: SegmentStore) -> None:
        _segment(store)
        both, pause = threading.Barrier(2, timeout=_LONG), threading.Event()
        clock, seconds = SystemClock(), []

        def append_all() -> None:
            for number in range(100):
                both.wait()
                pause.wait(number % 5 * 0.0005)  # before, during and after the beginning of the wait
                store.append("s", b"x")

        with ThreadPoolExecutor(1) as threads:
            appending = threads.submit(append_all)
            for length in range(100):
                both.wait()
                before = clock.monotonic()
                assert store.wait({"s": length}, _LONG) == {"s"}
                seconds.append(clock.monotonic() - before)
            appending.result(_LONG)
        # A store that misses a push and finds the change only by a later check is too slow here.
        assert sorted(seconds)[50] < 0.4 or not store.guarantees.push

    def test_a_wait_ends_at_its_timeout(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        clock = SystemClock()
        for timeout in (0.0, 0.1):
            before = clock.monotonic()
            assert store.wait({"s": 4}, timeout) == frozenset()
            assert timeout * 0.9 <= clock.monotonic() - before < _LONG

    def test_a_waiting_reader_hears_each_append(self, store: SegmentStore) -> None:
        _segment(store)
        heard = threading.Semaphore(0)

        def hear(count: int) -> None:
            for length in range(count):
                assert store.wait({"s": length}, _LONG) == {"s"}
                assert store.info("s").length == length + 1
                heard.release()

        with ThreadPoolExecutor() as threads:
            hearing = threads.submit(hear, 100)
            for _ in range(100):
                store.append("s", b"x")
                assert heard.acquire(timeout=_LONG)
            hearing.result(_LONG)

    @pytest.mark.parametrize("change", ["append", "seal", "delete"])
    def test_every_waiter_is_woken(self, store: SegmentStore, change: str) -> None:
        for name in "ab":
            _segment(store, b"data", name=name)
        changes: Mapping[str, Callable[[], object]] = {
            "append": lambda: store.append("b", b"x"),
            "seal": lambda: store.seal("b"),
            "delete": lambda: store.delete("b"),
        }
        with ThreadPoolExecutor(8) as threads:
            waiting = _started(threads, 8, lambda: store.wait({"a": 4, "b": 4}, _LONG))
            changes[change]()
            assert [future.result(_LONG) for future in waiting] == [{"b"}] * 8

    @pytest.mark.parametrize("change", ["append", "seal", "delete"])
    def test_a_store_that_pushes_wakes_who_waits_at_once(self, store: SegmentStore, change: str) -> None:
        if not store.guarantees.push:
            return
        changes: Mapping[str, Callable[[str], object]] = {
            "append": lambda name: store.append(name, b"x"),
            "seal": store.seal,
            "delete": store.delete,
        }
        clock, seconds = SystemClock(), []
        with ThreadPoolExecutor(1) as threads:
            for name in "abc":
                store.create(name)
                (waiting,) = _started(threads, 1, partial(store.wait, {name: 0}, _LONG))
                before = clock.monotonic()
                changes[change](name)
                assert waiting.result(_LONG) == {name}
                seconds.append(clock.monotonic() - before)
        # Detects a store that polls once per second; the minimum ignores a machine that is busy at times.
        assert min(seconds) < 0.4

    def test_a_change_of_attributes_or_of_another_segment_wakes_nobody(self, store: SegmentStore) -> None:
        for name in "ab":
            _segment(store, b"data", name=name)
        with ThreadPoolExecutor(1) as threads:
            (waiting,) = _started(threads, 1, lambda: store.wait({"a": 4}, 0.3))
            store.append("a", b"", attributes={"x": AttributeChange(None, b"1")})
            store.append("b", b"x")
            assert waiting.result(_LONG) == frozenset()

    def test_many_segments_are_waited_for_at_once(self, store: SegmentStore) -> None:
        names = [f"s/{number}" for number in range(600)]
        for name in names:
            store.create(name)
        with ThreadPoolExecutor(1) as threads:
            (waiting,) = _started(threads, 1, lambda: store.wait(dict.fromkeys(names, 0), _LONG))
            store.append(names[-1], b"x")
            assert waiting.result(_LONG) == {names[-1]}

    # threads

    def test_appends_of_many_threads_are_all_stored_once(self, store: SegmentStore) -> None:
        _segment(store)

        def append_many(thread: int) -> list[int]:
            records = [f"{thread:03}:{number:03};".encode() for number in range(50)]
            return [_appended(store.append("s", record)).offset for record in records]

        with ThreadPoolExecutor(8) as threads:
            offsets = list(threads.map(append_many, range(8)))
        data = store.read("s", 0, 1 << 20)
        assert len(data) == 8 * 8 * 50
        for thread, own_offsets in enumerate(offsets):
            assert own_offsets == sorted(own_offsets)
            for number, offset in enumerate(own_offsets):
                assert data[offset : offset + 8] == f"{thread:03}:{number:03};".encode()

    def test_of_many_appends_at_one_offset_one_succeeds(self, store: SegmentStore) -> None:
        _segment(store)
        with ThreadPoolExecutor(8) as threads:
            for attempt in range(20):

                def race(thread: int, offset: int = attempt * 4) -> object:
                    return store.append("s", b"%04d" % thread, expected_offset=offset)

                results = list(threads.map(race, range(8)))
                winners = [thread for thread, result in enumerate(results) if isinstance(result, Appended)]
                assert len(winners) == 1
                lost = Conflict(attempt * 4 + 4, b"%04d" % winners[0])
                assert [result for result in results if isinstance(result, Conflict)] == [lost] * 7

    def test_of_many_changes_of_one_attribute_one_succeeds(self, store: SegmentStore) -> None:
        _segment(store)

        def count(thread: int) -> int:
            successes = 0
            for _ in range(50):
                now = store.attributes("s").get("a")
                following = b"%d" % (int(now or b"0") + 1)
                result = store.append("s", b"x", attributes={"a": AttributeChange(now, following)})
                successes += isinstance(result, Appended)
            return successes

        with ThreadPoolExecutor(4) as threads:
            successes = sum(threads.map(count, range(4)))
        assert store.attributes("s") == {"a": b"%d" % successes}
        assert store.info("s").length == successes

    def test_attributes_that_are_only_compared_do_not_change_meanwhile(self, store: SegmentStore) -> None:
        """Of two appends that each require the other's attribute to be absent, one loses."""
        _segment(store)
        with ThreadPoolExecutor(2) as threads:
            for attempt in range(20):
                barrier = threading.Barrier(2)

                def set_one(mine: str, other: str, barrier: threading.Barrier = barrier) -> object:
                    changes = {mine: AttributeChange(ANY, b"1"), other: AttributeChange(None, None)}
                    barrier.wait(_LONG)
                    return store.append("s", b"", attributes=changes)

                one, other = f"{attempt}/a", f"{attempt}/b"
                racing = [threads.submit(set_one, one, other), threads.submit(set_one, other, one)]
                results = [each.result(_LONG) for each in racing]
                assert sum(isinstance(result, Appended) for result in results) == 1

    def test_an_attribute_that_changes_often_takes_nothing_from_the_data(self, store: SegmentStore) -> None:
        _segment(store, b"0", other=b"stays")
        for number in range(1, 60):
            store.append("s", b"%d" % (number % 10), attributes={"often": AttributeChange(ANY, b"%d" % number)})
            store.append("s", b"", attributes={"often": AttributeChange(b"%d" % number, b"%d" % number)})
        assert store.read("s", 0, 100) == b"0123456789" * 6
        assert store.attributes("s") == {"other": b"stays", "often": b"59"}

    def test_attributes_that_are_written_with_data_outlive_the_data(self, store: SegmentStore) -> None:
        """A store may keep them beside the data. Then truncating or sealing it must leave them."""
        _segment(store)
        for number in range(5):
            change = AttributeChange(b"%d" % (number - 1) if number else None, b"%d" % number)
            assert store.append("s", b"data", attributes={"a": change}) == Appended(4 * number, 4 * number + 4)
            store.truncate("s", 4 * number + 2)
            assert store.attributes("s") == {"a": b"%d" % number}
        assert store.append("s", b"", attributes={"b": AttributeChange(None, b"1")}) == Appended(20, 20)
        store.truncate("s", 20)
        wrong = AttributeChange(b"3", b"lost")
        assert store.append("s", b"data", attributes={"a": wrong}) == Conflict(20, b"", {"a": b"4"})
        assert store.append("s", b"data", attributes={"a": AttributeChange(b"4", None)}) == Appended(20, 24)
        assert store.append("s", b"data", attributes={"a": AttributeChange(None, b"new")}) == Appended(24, 28)
        store.seal("s")
        assert store.attributes("s") == {"a": b"new", "b": b"1"}

    # append together

    def test_appends_to_several_segments_are_made_in_one_step(self, store: SegmentStore) -> None:
        for name in "abc":
            _segment(store, name.encode(), name=name)
        appends = [
            Append("a", b"1"),
            Append("b", b"", attributes={"x": AttributeChange(None, b"2")}),
            Append("c", b"333", expected_offset=1),
        ]
        if not store.guarantees.atomic_multi_append:
            with pytest.raises(InvalidArgumentError):
                store.append_together(appends)
            return
        assert store.append_together(appends) == (Appended(1, 2), Appended(1, 1), Appended(1, 4))
        assert [store.read(name, 0, 9) for name in "abc"] == [b"a1", b"b", b"c333"]
        assert [store.attributes(name) for name in "abc"] == [{}, {"x": b"2"}, {}]
        assert store.append_together([]) == ()

    def test_one_unexpected_part_prevents_them_all(self, store: SegmentStore) -> None:
        if not store.guarantees.atomic_multi_append:
            return
        for name in "abc":
            _segment(store, name.encode() * 3, name=name, x=b"1")
        answer = store.append_together(
            [
                Append("a", b"lost", expected_offset=3, attributes={"x": AttributeChange(b"1", b"2")}),
                Append("b", b"lost", expected_offset=1),
                Append("c", b"lost", attributes={"x": AttributeChange(None, b"2")}),
            ]
        )
        assert answer == {"b": Conflict(3, b"bb"), "c": Conflict(3, b"", {"x": b"1"})}
        assert [store.read(name, 0, 9) for name in "abc"] == [b"aaa", b"bbb", b"ccc"]
        assert [store.attributes(name) for name in "abc"] == [{"x": b"1"}] * 3

    def test_a_part_that_cannot_be_appended_at_all_prevents_them_all(self, store: SegmentStore) -> None:
        if not store.guarantees.atomic_multi_append:
            return
        for name in "abc":
            _segment(store, name=name)
        store.seal("b")
        store.delete("c")
        for impossible, error in (("b", SealedError), ("c", NotFoundError), ("unknown", NotFoundError)):
            with pytest.raises(error):
                store.append_together([Append("a", b"lost"), Append(impossible, b"lost")])
        half = bytes(MAX_APPEND_BYTES // 2 + 1)
        wrong = [
            [Append("a", b"lost"), Append("a", b"lost")],
            [Append("a", half), Append("b", half)],
            [Append("a", b"lost"), Append("b", b"lost", expected_offset=-1)],
        ]
        for appends in wrong:
            with pytest.raises(InvalidArgumentError):
                store.append_together(appends)
        assert store.info("a").length == 0

    def test_of_many_appends_to_the_same_segments_one_succeeds(self, store: SegmentStore) -> None:
        if not store.guarantees.atomic_multi_append:
            return
        for name in "ab":
            _segment(store, name=name)
        with ThreadPoolExecutor(4) as threads:
            for attempt in range(20):

                def race(thread: int, offset: int = attempt * 4) -> object:
                    parts = [Append(name, b"%04d" % thread, expected_offset=offset) for name in "ab"]
                    # Each call in another order: calls that lock segment by segment must not deadlock.
                    return store.append_together(parts if thread % 2 else parts[::-1])

                results = list(threads.map(race, range(4)))
                assert sum(isinstance(result, tuple) for result in results) == 1
        assert store.read("a", 0, 100) == store.read("b", 0, 100)

    # concat

    def test_a_sealed_segment_is_appended_to_another(self, store: SegmentStore) -> None:
        data = _pattern(300_000)
        _segment(store, b"before", name="target", x=b"1")
        _segment(store, data[:100_000], name="source", y=b"1")
        store.append("source", data[100_000:])
        store.seal("source")
        changes = {"x": AttributeChange(b"1", b"2")}
        if not store.guarantees.server_side_copy:
            with pytest.raises(InvalidArgumentError):
                store.concat("target", "source", expected_offset=6, attributes=changes)
            return
        for start in (0, 1, 65_536, 120_000):
            store.truncate("source", start)
            length = store.info("target").length
            end = length + len(data) - start
            assert store.concat("target", "source", expected_offset=length) == Appended(length, end)
            assert store.read("target", length, 1 << 20) == data[start:]
        assert store.concat("target", "source", expected_offset=6, attributes=changes) == Conflict(
            end, data[:MAX_DELTA_BYTES], {"x": b"1"}
        )
        assert store.concat("target", "source", attributes=changes) == Appended(end, end + len(data) - start)
        assert store.attributes("target") == {"x": b"2"}
        assert store.append("target", b"after", expected_offset=end + len(data) - start)
        assert store.read("target", end, 1 << 20) == data[start:] + b"after"
        assert store.read("source", start, 1 << 20) == data[start:]
        store.delete("source")
        assert store.read("target", 6, len(data)) == data

    def test_a_segment_that_nobody_reads_any_more_is_appended_to_another(self, store: SegmentStore) -> None:
        """It may be empty afterwards. Otherwise this is `concat`."""
        if not store.guarantees.server_side_copy:
            return
        data = _pattern(300_000)
        _segment(store, b"before", name="target", x=b"1")
        for name, start in (("whole", 0), ("truncated", 70_000), ("empty", 300_000)):
            _segment(store, data, name=name)
            store.truncate(name, start)
            with pytest.raises(InvalidArgumentError):
                store.concat_unread("target", name)
            store.seal(name)
        changes = {"x": AttributeChange(b"1", b"2")}
        assert store.concat_unread("target", "whole", expected_offset=5) == Conflict(6, b"e")
        wrong = {"x": AttributeChange(b"5", b"2")}
        assert store.concat_unread("target", "whole", attributes=wrong) == Conflict(6, attributes={"x": b"1"})
        assert store.read("whole", 0, 1 << 20) == data
        assert store.concat_unread("target", "whole", attributes=changes) == Appended(6, 300_006)
        assert store.attributes("target") == {"x": b"2"}
        assert store.concat_unread("target", "truncated", expected_offset=300_006) == Appended(300_006, 530_006)
        assert store.concat_unread("target", "empty") == Appended(530_006, 530_006)
        for name in ("whole", "truncated", "empty"):
            store.forget(name)
        assert store.append("target", b"after") == Appended(530_006, 530_011)
        assert store.read("target", 0, 1 << 20) == b"before" + data + data[70_000:] + b"after"
        assert store.wait({"target": 6}, 0) == {"target"}

    def test_an_empty_segment_is_appended_to_another(self, store: SegmentStore) -> None:
        if not store.guarantees.server_side_copy:
            return
        _segment(store, b"before", name="target")
        for name, data in (("empty", b""), ("truncated", b"0123")):
            _segment(store, data, name=name)
            store.truncate(name, len(data))
            store.seal(name)
            assert store.concat("target", name) == Appended(6, 6)
        assert store.read("target", 0, 100) == b"before"

    def test_what_cannot_be_concatenated_is_refused(self, store: SegmentStore) -> None:
        if not store.guarantees.server_side_copy:
            return
        for name in ("target", "open", "sealed"):
            _segment(store, b"data", name=name)
        store.seal("sealed")
        for target, source, error in (
            ("target", "open", InvalidArgumentError),
            ("sealed", "sealed", InvalidArgumentError),
            ("target", "unknown", NotFoundError),
            ("unknown", "sealed", NotFoundError),
        ):
            with pytest.raises(error):
                store.concat(target, source)
            with pytest.raises(error):
                store.concat_unread(target, source)
        _segment(store, b"data", name="sealed too")
        store.seal("sealed too")
        with pytest.raises(SealedError):
            store.concat("sealed too", "sealed")
        with pytest.raises(SealedError):
            store.concat_unread("sealed too", "sealed")
        assert store.read("target", 0, 100) == b"data"

    # copy segments

    def test_segments_are_copied_with_their_offsets_and_sealed(self, store: SegmentStore) -> None:
        data = _pattern(300_000)
        for name, start in (("a", 0), ("b", 100_001)):
            _segment(store, data[:100_000], name=name, x=b"1")
            store.append(name, data[100_000:])
            store.truncate(name, start)
        store.seal("b")
        bounds = {
            "a1": ("a", 0, 300_000),
            "a2": ("a", 1, 299_999),
            "a3": ("a", 65_536, 131_072),
            "a4": ("a", 70_000, 70_001),
            "a5": ("a", 300_000, 300_000),
            "b1": ("b", 100_001, 300_000),
            "b2": ("b", 200_000, 200_000),
        }
        copies = [SegmentCopy(source, name, start, end) for name, (source, start, end) in bounds.items()]
        if not store.guarantees.server_side_copy:
            with pytest.raises(InvalidArgumentError):
                store.copy_segments(copies)
            return
        assert store.copy_segments(copies) is True
        assert store.copy_segments(copies) is False
        for name, (_, start, end) in bounds.items():
            assert store.info(name) == SegmentInfo(name, start, end, sealed=True)
            assert store.read(name, start, 1 << 20) == data[start:end]
            assert store.attributes(name) == {}
            with pytest.raises(SealedError):
                store.append(name, b"more")
            if start:
                with pytest.raises(TruncatedError):
                    store.read(name, start - 1, 1)
        assert store.read("b1", 131_070, 5) == data[131_070:131_075]
        store.truncate("a1", 150_000)
        assert store.read("a1", 150_000, 3) == data[150_000:150_003]
        assert store.append("a", b"more") == Appended(300_000, 300_004)
        store.delete("a")
        assert store.read("a2", 299_990, 100) == data[299_990:299_999]
        assert list(store.list("a")) == ["a1", "a2", "a3", "a4", "a5"]

    def test_one_segment_that_cannot_be_copied_prevents_them_all(self, store: SegmentStore) -> None:
        if not store.guarantees.server_side_copy:
            return
        _segment(store, b"0123456789", name="s")
        store.truncate("s", 3)
        for name in ("gone", "there"):
            _segment(store, b"data", name=name)
        store.delete("gone")
        good = SegmentCopy("s", "good", 3, 10)
        for wrong, error in (
            (SegmentCopy("s", "t", 2, 10), TruncatedError),
            (SegmentCopy("s", "t", 3, 11), InvalidArgumentError),
            (SegmentCopy("s", "t", 5, 4), InvalidArgumentError),
            (SegmentCopy("s", "t", -1, 4), InvalidArgumentError),
            (SegmentCopy("s", "good", 3, 10), InvalidArgumentError),
            (SegmentCopy("s", "s", 3, 10), InvalidArgumentError),
            (SegmentCopy("s", "", 3, 10), InvalidArgumentError),
            (SegmentCopy("unknown", "t", 0, 0), NotFoundError),
            (SegmentCopy("gone", "t", 0, 0), NotFoundError),
            (SegmentCopy("s", "there", 3, 10), AlreadyExistsError),
            (SegmentCopy("s", "gone", 3, 10), AlreadyExistsError),
        ):
            for copies in ([good, wrong], [wrong, good]):
                with pytest.raises(error):
                    store.copy_segments(copies)
        assert list(store.list()) == ["s", "there"]
        assert store.read("there", 0, 10) == b"data"
        assert store.copy_segments([good])

    def test_of_many_that_copy_the_same_one_does(self, store: SegmentStore) -> None:
        if not store.guarantees.server_side_copy:
            return
        data = _pattern(100_000)
        for name in "ab":
            _segment(store, data, name=name)
        with ThreadPoolExecutor(4) as threads:
            for attempt in range(5):
                copies = [SegmentCopy(name, f"{attempt}/{name}", 1, len(data)) for name in "ab"]

                def race(thread: int, copies: list[SegmentCopy] = copies) -> bool:
                    return store.copy_segments(copies if thread % 2 else copies[::-1])

                assert sorted(threads.map(race, range(4))) == [False, False, False, True]
                for name in "ab":
                    assert store.read(f"{attempt}/{name}", 1, len(data)) == data[1:]

    def test_a_segment_is_copied_while_it_is_written(self, store: SegmentStore) -> None:
        if not store.guarantees.server_side_copy:
            return
        record = _pattern(4096)
        _segment(store, record)
        stop = threading.Event()

        def write() -> int:
            count = 1
            while not stop.is_set():
                _appended(store.append("s", record))
                count += 1
            return count

        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(write)
            try:
                for attempt in range(20):
                    length = store.info("s").length
                    assert store.copy_segments([SegmentCopy("s", f"copy {attempt}", 0, length)])
                    assert store.info(f"copy {attempt}").length == length
            finally:
                stop.set()
            written = writing.result(_LONG)
        assert store.info("s").length == written * len(record)
        assert store.read("copy 19", length - len(record), 1 << 20) == record

    def test_a_segment_that_is_truncated_while_it_is_copied_is_copied_whole_or_not_at_all(
        self, store: SegmentStore
    ) -> None:
        if not store.guarantees.server_side_copy:
            return
        data = _pattern(2_000_000)
        with ThreadPoolExecutor(2) as threads:
            for attempt in range(10):
                name, copy = f"s{attempt}", f"c{attempt}"
                _segment(store, data, name=name)
                copying = threads.submit(store.copy_segments, [SegmentCopy(name, copy, 0, len(data))])
                threads.submit(store.truncate, name, len(data)).result(_LONG)
                try:
                    assert copying.result(_LONG)
                except TruncatedError:
                    assert copy not in store.list(copy)
                else:
                    assert store.read(copy, 0, len(data)) == data

    # fair lock

    def test_a_fair_lock_is_held_by_one_at_a_time(self, store: SegmentStore) -> None:
        if not store.guarantees.fair_lock:
            with pytest.raises(InvalidArgumentError), store.fair_lock("s", 0):
                pass
            return
        holders = 0

        def hold(_: int) -> None:
            nonlocal holders
            for _ in range(20):
                with store.fair_lock("s", _LONG) as is_held:
                    assert is_held
                    holders += 1
                    assert holders == 1
                    store.list()
                    holders -= 1

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(hold, range(4)))

    def test_a_fair_lock_is_given_up_at_the_timeout(self, store: SegmentStore) -> None:
        if not store.guarantees.fair_lock:
            return
        with store.fair_lock("s", _LONG):
            for timeout in (0.0, 0.05):
                with store.fair_lock("s", timeout) as is_held:
                    assert not is_held
            with store.fair_lock("another", _LONG) as is_held:
                assert is_held
        with store.fair_lock("s", _LONG) as is_held:
            assert is_held

    def test_a_fair_lock_that_does_not_change_hands_is_given_up_after_the_patience(self, store: SegmentStore) -> None:
        if not store.guarantees.fair_lock:
            return
        with store.fair_lock("s", _LONG):
            for timeout in (math.inf, _LONG):
                with store.fair_lock("s", timeout, 0.05) as is_held:
                    assert not is_held

    def test_a_fair_lock_is_passed_on_when_its_holder_fails(self, store: SegmentStore) -> None:
        if not store.guarantees.fair_lock:
            return
        with pytest.raises(KeyError), store.fair_lock("s", _LONG):
            raise KeyError
        with store.fair_lock("s", 0) as is_held:
            assert is_held

    # several stores, several processes

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_two_stores_of_a_process_are_safe_from_a_process_that_comes_and_goes(
        self, store: SegmentStore, address: str
    ) -> None:
        if not store.guarantees.many_processes:
            return
        _segment(store)
        length = 0
        with _visits(store, address) as visit:
            for _ in range(2):
                with open_store(address) as other:
                    for appender, looker in ((store, other), (other, store)):
                        assert visit(length) == Appended(length, length + 5)
                        assert appender.append("s", b"lost", expected_offset=length) == Conflict(length + 5, b"visit")
                        kept = appender.append("s", b"kept", expected_offset=length + 5)
                        assert kept == Appended(length + 5, length + 9)
                        assert visit(length) == Conflict(length + 9, b"visitkept")
                        assert looker.read("s", length, 100) == b"visitkept"
                        length += 9
                assert store.read("s", 0, 1000) == b"visitkept" * (length // 9)

    # close, fork

    def test_a_closed_store_refuses_every_call(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        store.close()
        store.close()
        calls = _calls_on(store, "s")
        calls += [lambda: store.create("t"), lambda: store.delete("s"), lambda: store.forget("s")]
        calls += [lambda: store.list(), lambda: store.wait({}, 0)]
        for call in calls:
            with pytest.raises(ClosedError):
                call()

    def test_closing_wakes_who_waits(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        with ThreadPoolExecutor(4) as threads:
            waiting = _started(threads, 4, lambda: store.wait({"s": 4}, 10 * _LONG))
            store.close()
            for future in waiting:
                with pytest.raises(ClosedError):
                    future.result(_LONG)

    def test_threads_may_close_it_at_once(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        with ThreadPoolExecutor(4) as threads:
            for closing in _started(threads, 4, store.close):
                closing.result(_LONG)

    def test_leaving_its_block_closes_the_store(self, store: SegmentStore) -> None:
        with store as entered:
            assert entered.create("s")
        with pytest.raises(ClosedError):
            store.info("s")

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_a_forked_child_may_not_use_the_store(self, store: SegmentStore) -> None:
        _segment(store, b"data")
        child = os.fork()
        if not child:
            os._exit(_exit_code_of_a_child(store))
        assert os.waitpid(child, 0)[1] == 0
        assert store.append("s", b"more", expected_offset=4) == Appended(4, 8)
        assert store.read("s", 0, 100) == b"datamore"

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_a_forked_child_that_ends_takes_nothing_of_the_store_with_it(
        self, store: SegmentStore, address: str
    ) -> None:
        """`close`, the garbage collector or the exit of the child may free the inherited store."""
        if not store.guarantees.many_processes:
            return
        _segment(store)
        _run(_FORK, address)
        assert store.read("s", 0, 100) == b"beforeafter"

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_a_forked_child_may_open_a_store_of_its_own_or_is_told_that_it_may_not(
        self, store: SegmentStore, address: str
    ) -> None:
        """A store that it opens works like the parent's."""
        if not store.guarantees.many_processes:
            return
        _segment(store)
        _run(_OPEN_IN_A_FORK, address)


def _exit_code_of_a_child(store: SegmentStore) -> int:
    """Return 0 if every call is refused."""
    try:
        for call in _calls_on(store, "s"):
            try:
                call()
            except ClosedError:
                continue
            return 1
        store.close()
    except BaseException:
        return 2
    return 0


#: Forks a process for each visit and opens no store itself. It ends the line when the process has ended.
_VISITS = """
import importlib, os, signal, sys
from synchronizer import open_store
address, seconds, module = sys.argv[1:]
importlib.import_module(module)
for offset in sys.stdin:
    child = os.fork()
    if not child:
        signal.alarm(int(seconds))
        with open_store(address, must_exist=True) as store:
            print(repr(store.append("s", b"visit", expected_offset=int(offset))), end="", flush=True)
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print(flush=True)
"""

#: Its children free the inherited store in each possible way and exit, while a thread of the parent waits.
_FORK = """
import gc, os, sys, threading
from synchronizer import Appended, open_store
store = open_store(sys.argv[1])
assert store.append("s", b"before", expected_offset=0) == Appended(0, 6)
woken = []
waiting = threading.Thread(target=lambda: woken.append(store.wait({"s": 6}, 30)))
waiting.start()
for way in range(3):
    child = os.fork()
    if not child:
        if way == 0:
            store.close()
        if way == 1:
            del store
            gc.collect()
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, way
assert store.read("s", 0, 10) == b"before"
assert store.append("s", b"after", expected_offset=6) == Appended(6, 11)
waiting.join()
assert woken == [{"s"}], woken
store.close()
"""

_OPEN_IN_A_FORK = """
import os, sys
from synchronizer import Appended, ClosedError, Conflict, open_store
store = open_store(sys.argv[1])
child = os.fork()
if not child:
    try:
        with open_store(sys.argv[1]) as own:
            assert own.append("s", b"child", expected_offset=0) == Appended(0, 5)
            assert own.wait({"s": 0}, 30) == {"s"}
    except ClosedError:
        sys.exit(7)
    sys.exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert code in (0, 7), code
expected = Appended(0, 6) if code else Conflict(5, b"child")
assert store.append("s", b"parent", expected_offset=0) == expected
store.close()
with open_store(sys.argv[1]) as store:
    assert store.read("s", 0, 100) == (b"parent" if code else b"child")
"""


@contextmanager
def _visits(store: SegmentStore, address: str) -> Iterator[Callable[[int], object]]:
    """Yield a function: each call runs a process that opens the store, appends at an offset, and returns the answer."""
    module = type(store).__module__  # imported before the forks, so that not every child imports a driver
    module = module if module.startswith("synchronizer.") else "synchronizer"
    with subprocess.Popen(
        _command(_VISITS, address, str(math.ceil(4 * _LONG)), module),
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None and answers is not None

        def visit(expected_offset: int) -> object:
            print(expected_offset, file=asked, flush=True)
            return eval(answers.readline() or "None", {"Appended": Appended, "Conflict": Conflict})

        try:
            yield visit
        finally:
            _, errors = process.communicate()
        assert process.returncode == 0 and "Traceback" not in errors, errors


def _run(program: str, *arguments: str) -> None:
    """Run the program in a process of its own and check that it ends without an error."""
    command = _command(program, *arguments)
    ran = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=4 * _LONG)
    assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr


def _command(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # so that plugins that add a scheme are found


def _many_segments(store: SegmentStore) -> dict[str, bytes]:
    """Make 700 short segments, which are returned, and some others."""
    short = {f"s/{number}": b"%d" % number * 3 for number in range(700)}
    for name, data in short.items():
        _segment(store, data[:4], name=name)
        _appended(store.append(name, data[4:]))
    for name, data in (("large", _pattern(300_000)), ("cut", b"0123456789"), ("gone", b"data"), ("empty", b"")):
        _segment(store, data, name=name)
    store.truncate("cut", 3)
    store.delete("gone")
    return short


def _segment(
    store: SegmentStore,
    data: bytes = b"",
    *,
    name: str = "s",
    attributes: Mapping[str, bytes] | None = None,
    **more_attributes: bytes,
) -> None:
    values = {**(attributes or {}), **more_attributes}
    store.create(name)
    changes = {attribute: AttributeChange(None, value) for attribute, value in values.items()}
    assert isinstance(store.append(name, data, attributes=changes), Appended)


def _calls_on(store: SegmentStore, segment: str) -> list[Callable[[], object]]:
    return [
        lambda: store.info(segment),
        lambda: store.append(segment, b"x"),
        lambda: store.append(segment, b"", attributes={"a": AttributeChange(None, b"1")}),
        lambda: store.read(segment, 0, 1),
        lambda: store.attributes(segment),
        lambda: store.attributes(segment, names=["a"]),
        lambda: store.truncate(segment, 0),
        lambda: store.seal(segment),
    ]


def _appended(result: object) -> Appended:
    assert isinstance(result, Appended)
    return result


def _pattern(size: int) -> bytes:
    """Return bytes in which no four aligned bytes repeat."""
    return array("I", range(size // 4 + 1)).tobytes()[:size]


def _until(condition: Callable[[], bool]) -> None:
    clock = SystemClock()
    deadline = clock.monotonic() + _LONG
    while not condition():
        assert clock.monotonic() < deadline
        clock.wait(threading.Event(), 0.001)


def _started(threads: ThreadPoolExecutor, count: int, call: Callable[[], T]) -> list[Future[T]]:
    """Return futures of ``call`` in ``count`` threads that have all begun."""
    begun = threading.Barrier(count + 1)

    def begin() -> T:
        begun.wait(_LONG)
        return call()

    futures = [threads.submit(begin) for _ in range(count)]
    begun.wait(_LONG)
    # Most threads are inside the call by now. A thread that is not makes the test weaker, but never wrong.
    SystemClock().wait(threading.Event(), 0.02)
    return futures
