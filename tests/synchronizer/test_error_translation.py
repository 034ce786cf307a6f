"""Whatever goes wrong in a store comes out as an error of this distribution, also from a backend of somebody else."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest
from pydantic import BaseModel, model_serializer

from synchronizer import (
    Append,
    AppendResult,
    AttributeChange,
    Guarantees,
    NotFoundError,
    ReaderGroupError,
    Revision,
    SegmentCopy,
    SegmentInfo,
    SegmentStore,
    State,
    StoreUnavailableError,
    UnknownOutcome,
    Update,
    background_errors,
    open_store,
)
from synchronizer.recipes.collections.values import ValueCodec
from synchronizer.state import StateCodec

pytestmark = pytest.mark.unexpected_errors


class BrokenStore(SegmentStore):
    """Every verb raises ``error``, which nothing in it knows of."""

    def __init__(self, error: BaseException) -> None:
        self.url = "broken://"
        self.guarantees = Guarantees(
            durable=True,
            linearizable_append=True,
            linearizable_read=True,
            push=False,
            many_processes=False,
            many_hosts=False,
        )
        self.error = error
        self.fails_at_exit = False

    def create(self, segment: str) -> bool:
        raise self.error

    def create_together(self, segments: Mapping[str, bytes]) -> bool:
        raise self.error

    def delete(self, segment: str) -> None:
        raise self.error

    def forget(self, segment: str) -> None:
        raise self.error

    def info(self, segment: str) -> SegmentInfo:
        raise self.error

    def list(self, prefix: str = "") -> Iterator[str]:
        yield "a"
        raise self.error

    def append(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        raise self.error

    def append_together(self, appends: Sequence[Append]) -> UnknownOutcome:
        raise self.error

    def concat(self, segment: str, source: str, **conditions: object) -> AppendResult:
        raise self.error

    def copy_segments(self, copies: Sequence[SegmentCopy]) -> bool:
        raise self.error

    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        raise self.error

    def infos(self, segments: Collection[str]) -> Mapping[str, SegmentInfo]:
        raise self.error

    def read_starts(self, segments: Collection[str], max_bytes: int) -> Mapping[str, bytes]:
        raise self.error

    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        raise self.error

    def truncate(self, segment: str, offset: int) -> None:
        raise self.error

    def seal(self, segment: str) -> SegmentInfo:
        raise self.error

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        raise self.error

    def fair_lock(self, segment: str, timeout: float, patience: float = math.inf) -> AbstractContextManager[bool]:
        return self._lock()

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        if not self.fails_at_exit:
            raise self.error
        try:
            yield True
        finally:
            raise self.error

    def close(self) -> None:
        raise self.error


ERRORS = [ValueError("a"), OSError(24, "b"), KeyError("c"), MemoryError(), RuntimeError("d"), TypeError("in it")]

APPENDING: dict[str, Callable[[SegmentStore], object]] = {
    "append": lambda store: store.append("s", b"x"),
    "append_unread": lambda store: store.append_unread("s", b"x"),
    "append_unflushed": lambda store: store.append_unflushed("s", b"x"),
    "append_together": lambda store: store.append_together([Append("s", b"x")]),
    "concat": lambda store: store.concat("s", "t"),
    "concat_unread": lambda store: store.concat_unread("s", "t"),
}
REPEATABLE: dict[str, Callable[[SegmentStore], object]] = {
    "create": lambda store: store.create("s"),
    "create_together": lambda store: store.create_together({"s": b""}),
    "delete": lambda store: store.delete("s"),
    "forget": lambda store: store.forget("s"),
    "info": lambda store: store.info("s"),
    "infos": lambda store: store.infos(["s"]),
    "list": lambda store: list(store.list()),
    "copy_segments": lambda store: store.copy_segments([SegmentCopy("s", "t", 0, 1)]),
    "read": lambda store: store.read("s", 0, 1),
    "read_starts": lambda store: store.read_starts(["s"], 1),
    "attributes": lambda store: store.attributes("s"),
    "truncate": lambda store: store.truncate("s", 0),
    "seal": lambda store: store.seal("s"),
    "wait": lambda store: store.wait({"s": 0}, 0.0),
    "fair_lock": lambda store: store.fair_lock("s", 0.0).__enter__(),
    "close": lambda store: store.close(),
}


def test_every_verb_of_a_store_is_behind_the_boundary() -> None:
    verbs = {name for name in vars(SegmentStore) if not name.startswith("_") and callable(vars(SegmentStore)[name])}
    assert verbs == APPENDING.keys() | REPEATABLE.keys()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("verb", REPEATABLE)
def test_an_error_that_nobody_thought_of_says_that_the_store_is_away(verb: str, error: Exception) -> None:
    with pytest.raises(StoreUnavailableError) as caught:
        REPEATABLE[verb](BrokenStore(error))
    assert caught.value.__cause__ is error
    assert repr(error) in str(caught.value)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("verb", APPENDING)
def test_after_an_error_that_nobody_thought_of_an_append_may_be_stored(verb: str, error: Exception) -> None:
    answer = APPENDING[verb](BrokenStore(error))
    assert isinstance(answer, UnknownOutcome)
    assert isinstance(answer.cause, StoreUnavailableError) and answer.cause.__cause__ is error


@pytest.mark.parametrize("verb", [*APPENDING, *REPEATABLE])
def test_our_own_errors_and_interrupts_pass_through(verb: str) -> None:
    for error in (NotFoundError("there is none"), KeyboardInterrupt(), SystemExit(1)):
        with pytest.raises(type(error)) as caught:
            {**APPENDING, **REPEATABLE}[verb](BrokenStore(error))
        assert caught.value is error


def test_each_such_error_is_counted() -> None:
    class StrangeError(Exception):
        pass

    store = BrokenStore(StrangeError())
    for _ in range(3):
        store.append("s", b"")
    assert [count for kind, count in background_errors().items() if kind.startswith("StrangeError at ")] == [3]


class Interrupted(BaseModel, frozen=True):
    """A value that is being encoded when the signal comes."""

    @model_serializer
    def fields(self) -> dict[str, object]:
        raise KeyboardInterrupt


class Holder(State):
    value: Interrupted = Interrupted()


class Hold(Update[Holder], tag="hold"):
    value: Interrupted = Interrupted()

    def apply_to(self, state: Holder, revision: Revision) -> Holder:
        return state


def test_pydantic_hides_no_interrupt() -> None:
    codec = StateCodec(Holder, [Hold])
    with pytest.raises(KeyboardInterrupt):
        codec.encode_updates([Hold()])
    with pytest.raises(KeyboardInterrupt):
        codec.encode_snapshot(Holder(), 0)
    with pytest.raises(KeyboardInterrupt):
        ValueCodec(Interrupted).encode(Interrupted())


def test_a_call_with_arguments_that_the_verb_does_not_have_raises_type_error() -> None:
    with open_store("memory://") as store:
        with pytest.raises(TypeError):
            store.append("s")  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            store.read("s", 0, 1, timeout=3)  # type: ignore[call-arg]


def test_what_the_block_of_a_fair_lock_raises_passes_through() -> None:
    with open_store("memory://") as store:
        error = ValueError("of the block")
        with pytest.raises(ValueError) as caught, store.fair_lock("s", 1.0):
            raise error
        assert caught.value is error


def test_a_fair_lock_that_cannot_be_let_go_says_so_with_our_error() -> None:
    store = BrokenStore(OSError(24, "no descriptor"))
    store.fails_at_exit = True
    with pytest.raises(StoreUnavailableError), store.fair_lock("s", 1.0):
        pass


def test_what_fails_at_opening_is_our_error_too() -> None:
    with pytest.raises(ReaderGroupError):
        open_store("sqlite:///\0.db")
