"""The dead letters of the store: which streams have some, how many are pending, and pages of them, the newest first."""

from __future__ import annotations

import base64
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from itertools import islice
from typing import Any, Final, NamedTuple, Self

from synchronizer import Clock, InvalidArgumentError, NotFoundError, ReaderGroupError

from ..client import Client
from ..dead_letters.letters import DeadLetters, StoredDeadLetter, pending_in
from ..dead_letters.statuses import Status
from ..streams.config import number_of

#: How many letters a page has.
PAGE: Final = 25
#: How long a page may take. Its thread serves others too.
PAGE_SECONDS: Final = 15.0
#: How far a page looks back first; then further, until it is full.
_SPANS: Final = (timedelta(hours=1), timedelta(days=1), timedelta(days=30))
#: What a page shows of a text of a letter.
_SHOWN: Final = 200
_SHOWN_ERROR: Final = 500
_SHOWN_DATA: Final = 4_000
_SHOWN_HEADERS: Final = 20

#: How many pending letters of a stream are counted.
MAX_COUNTED: Final = 10_000
#: How many streams are opened at once to see if they hold letters, and when those that do not are opened again.
_PEEKS: Final = 10
_EMPTY_SECONDS: Final = 30.0
_OTHER_SECONDS: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class LetterCount:
    """The pending letters in a stream."""

    #: How many there are, by the stream that their events came from.
    by_source: Mapping[str, int]
    #: Whether only the first `MAX_COUNTED` were counted.
    is_partial: bool = False

    @property
    def pending(self) -> int:
        return sum(self.by_source.values())


class LetterStreams:
    """Finds the streams with dead letters, and counts those that are pending. For the thread of the sampler.

    Nothing names these streams but the programs of pools, so the first event of each stream decides.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._clock: Clock = client.clock
        self._lock = threading.Lock()
        self._opened: dict[str, DeadLetters] = {}
        self._counts: dict[str, LetterCount] = {}
        self._again_at: dict[str, float] = {}
        self._seen: dict[str, object] = {}
        #: By stream and segment: the letters before this offset are settled.
        self._starts: dict[str, Mapping[str, int]] = {}

    def of(self, stream: str) -> DeadLetters:
        """Return the letters of a stream. Any thread may call it."""
        with self._lock:
            found = self._opened.get(stream)
        if found is None:  # not kept: only the sampler knows if there are letters
            found = self._client.dead_letters(stream)
        return found

    def find(self) -> None:
        """Look for streams with letters among those that are not known yet."""
        names = {log.removeprefix("stream/") for log in self._client.store.list("stream/")}
        for gone in [name for name in (*self._counts, *self._again_at) if name not in names]:
            self._forget(gone)
        now = self._clock.monotonic()
        due = [name for name in names if name not in self._counts and self._again_at.get(name, float("-inf")) <= now]
        for name in sorted(due, key=lambda name: (self._again_at.get(name, float("-inf")), name))[:_PEEKS]:
            letters = self._client.dead_letters(name)
            self._again_at[name] = now + _OTHER_SECONDS
            try:
                has_letters = next(letters.list(status=None), None) is not None
            except ReaderGroupError as error:
                if error.retryable:
                    raise
                continue  # it holds something else, or it was deleted
            if not has_letters:
                self._again_at[name] = now + _EMPTY_SECONDS
                continue
            self._counts[name] = LetterCount({})
            with self._lock:
                self._opened[name] = letters

    def count(self) -> Mapping[str, LetterCount]:
        """Return the pending letters by stream. Streams that have not changed are not read again."""
        for name in list(self._counts):
            try:
                self._recount(name)
            except NotFoundError:  # deleted meanwhile
                self._forget(name)
        return dict(self._counts)

    def _recount(self, name: str) -> None:
        info = self._client.streams.info(name)
        changed = 0
        with suppress(NotFoundError):  # nothing was replayed or discarded yet
            changed = self._client.store.info(f"dead-letter-status/{name}").length
        seen = info.incarnation, info.head, info.tail, changed
        if seen == self._seen.get(name):
            return
        # By places and not by times, as clocks of writers differ. A letter that is settled never becomes pending again.
        starts = self._starts.get(name, {})
        ranges = [
            each.model_copy(update={"start": max(each.start, starts.get(each.data_segment, 0))})
            for each in self._client.batch.segment_ranges(name)
        ]
        pending = Counter[str]()
        first: dict[str, int] = {}
        is_whole = False
        try:
            for letter in islice(pending_in(self._opened[name], ranges), MAX_COUNTED):
                pending[letter.stream] += 1
                first.setdefault(letter.pointer.segment, letter.pointer.offset)
            is_whole = pending.total() < MAX_COUNTED
        except InvalidArgumentError:  # an event that is no letter ends the list
            pass
        self._starts[name] = {
            each.data_segment: first.get(each.segment, each.end if is_whole else each.start) for each in ranges
        }
        self._counts[name] = LetterCount(pending, pending.total() >= MAX_COUNTED)
        self._seen[name] = seen

    def _forget(self, name: str) -> None:
        for known in (self._counts, self._again_at, self._seen, self._starts):
            known.pop(name, None)
        with self._lock:
            self._opened.pop(name, None)


class Cursor(NamedTuple):
    """The place of a letter in the order of pages."""

    at: datetime
    segment: int
    offset: int

    @classmethod
    def of(cls, letter: StoredDeadLetter) -> Self:
        return cls(letter.written_at, number_of(letter.pointer.segment), letter.pointer.offset)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the cursor that `str` wrote."""
        at, *numbers = text.split("~")
        try:
            segment, offset = map(int, numbers)
            return cls(datetime.fromtimestamp(int(at) / 1_000_000, UTC), segment, offset)
        except (ValueError, OverflowError, OSError) as error:
            raise InvalidArgumentError("'older' must be what the last page returned", older=text) from error

    def __str__(self) -> str:
        return f"{_microseconds(self.at)}~{self.segment}~{self.offset}"


def page_of(
    letters: DeadLetters,
    clock: Clock,
    *,
    status: Status | None,
    error: str | None,
    key: str | None,
    older: Cursor | None,
) -> Mapping[str, Any]:
    """Return the newest letters that the filters select, as a document, and the cursor of the next page."""
    deadline = clock.monotonic() + PAGE_SECONDS
    end = datetime.fromtimestamp(clock.time(), UTC) if older is None else older.at
    found: list[StoredDeadLetter] = []
    for span in (*_SPANS, None):
        listed = letters.list(
            status=status,
            error=error,
            routing_key=key,
            since=None if span is None else _earlier(end, span),
            until=None if older is None else older.at + timedelta(microseconds=1),
        )
        older_ones = (each for each in listed if older is None or Cursor.of(each) < older)
        found = nlargest(PAGE + 1, _in_time(older_ones, clock, deadline), key=Cursor.of)
        if len(found) > PAGE:
            break
    return {
        "stream": letters.stream,
        "letters": [letter_document(each) for each in found[:PAGE]],
        "older": str(Cursor.of(found[PAGE - 1])) if len(found) > PAGE else None,
    }


def _in_time(letters: Iterator[StoredDeadLetter], clock: Clock, deadline: float) -> Iterator[StoredDeadLetter]:
    for each in letters:
        if clock.monotonic() > deadline:
            raise InvalidArgumentError(
                "there are too many dead letters for a page; use a filter, or 'readergroup dead-letters list'"
            )
        yield each


def _earlier(end: datetime, span: timedelta) -> datetime:
    try:
        return end - span
    except OverflowError:
        return datetime.min.replace(tzinfo=UTC)


def letter_document(letter: StoredDeadLetter) -> Mapping[str, Any]:
    data, is_text = _text(letter.letter.data, _SHOWN_DATA)
    return {
        "letter": str(letter.pointer),
        "at": letter.written_at.timestamp(),
        "status": letter.status,
        "key": None if letter.routing_key is None else _clipped(letter.routing_key, _SHOWN),
        "stream": letter.stream,
        "event": str(letter.letter.pointer),
        "attempts": letter.letter.attempts,
        "error": _clipped(letter.letter.error, _SHOWN_ERROR),
        "headers": {
            _clipped(name, _SHOWN): _text(value, _SHOWN)[0]
            for name, value in islice(letter.headers.items(), _SHOWN_HEADERS)
        },
        "data": data,
        "is_text": is_text,
        "bytes": len(letter.letter.data),
    }


def _text(data: bytes, most_bytes: int) -> tuple[str, bool]:
    """Return the first bytes as text, else in base64; and whether they are text."""
    shown = data[:most_bytes]
    try:
        return shown.decode(), True
    except UnicodeDecodeError as error:
        if len(data) > most_bytes and error.start > most_bytes - 4:  # the cut has divided a character
            return shown[: error.start].decode(), True
    return base64.b64encode(shown).decode(), False


def _clipped(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]} ..."


def _microseconds(at: datetime) -> int:
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
