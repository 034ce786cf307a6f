"""The layout of segments in a JetStream stream: subjects, headers, and the head in a segment's last message.

For a stream ``S`` and a segment's name as a token ``T`` (`token`):

- ``S.d.T`` holds the bytes. Each message says at which offset its bytes begin. The last message of an append also holds
  the state of the segment after it (`Head`). So the last message on the subject is the whole state, and a publish that
  expects its sequence is a compare-and-set on the whole segment. A deleted segment leaves one such message. Only that
  of a forgotten segment is purged, so that the sequence to expect starts again at 0; until then the name waits.
- ``S.a.T.A`` holds the value of the attribute ``A``. Each message replaces the one before. If it says that the value is
  carried, the head holds the value, or the attribute was removed: an append of data that changes only such attributes
  is a single message.
- ``S.g.T`` is the first message of every other change of attributes, so that a reader can check that all its values are
  of one moment.
- ``S.n.…`` exists as long as the segment, under its name split at the slashes, so that names are found by prefix. It
  changes only when the segment is sealed or deleted: an append of attributes only depends on it, and not on appends.
  The message of a sealed segment is a rollup, that of a deleted one is empty.
- ``S.w.T`` is not stored: the server sends the headers of ``S.d.T`` there, to wake waiting processes.

Any user who may publish to these subjects may have written anything there. This module checks everything that is read;
a message that is not from this SDK raises `CorruptStoreError`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from synchronizer.errors import CorruptStoreError

from .frames import Headers, headers_in
from .rights import NEWS_KIND, STORED_KINDS

EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_OF: Final = "Nats-Expected-Last-Subject-Sequence-Subject"
BATCH_ID: Final = "Nats-Batch-Id"
ROLLUP: Final = {"Nats-Rollup": "sub"}
HEAD: Final = "Rg-Head"
ATTRIBUTE: Final = "Rg-Attribute"
GROUP: Final = "Rg-Changes"
NAME: Final = "Rg-Name"

#: The largest number of messages in an atomic batch.
MAX_BATCH: Final = 1000
#: The longest names in a subject; a digest replaces longer ones. Lines of the protocol have at most 4096 bytes.
_MAX_TOKEN: Final = 300
_MAX_LEVELS: Final = 16
_DIGEST: Final = "~"
_EMPTY_TOKEN: Final = "%"


class Head(NamedTuple):
    """The state of a segment after the message ``sequence`` of its subject."""

    sequence: int
    offset: int  # of the message's own bytes
    length: int
    start_offset: int
    status: str
    carried: str = ""  # attributes with their values, see `carried_in`

    @property
    def is_sealed(self) -> bool:
        return self.status == SEALED

    @property
    def is_deleted(self) -> bool:
        return self.status in (DELETED, FORGOTTEN)

    @property
    def is_forgotten(self) -> bool:
        """Whether the name can be used again, once the messages up to this one are purged."""
        return self.status == FORGOTTEN

    @property
    def is_part(self) -> bool:
        """Whether more messages of the same append follow, so that this one is not the segment's state."""
        return self.status == PART


OPEN: Final = "open"
SEALED: Final = "sealed"
DELETED: Final = "deleted"
FORGOTTEN: Final = "forgotten"
PART: Final = "part"
_STATUS: Final = f"{OPEN}|{SEALED}|{DELETED}|{FORGOTTEN}|{PART}"
_HEAD: Final = re.compile(rf"([0-9]{{1,19}}) ([0-9]{{1,19}}) ([0-9]{{1,19}}) ({_STATUS})(?: ([!-~][ -~]*))?")
_COUNT: Final = re.compile(r"[0-9]{1,9}")
_SEQUENCE: Final = re.compile(r"[0-9]{1,19}")

REMOVED: Final = "removed"
SET: Final = "set"
CARRIED: Final = "carried"


def head_header(offset: int, length: int, start_offset: int, status: str, carried: str = "") -> dict[str, str]:
    return {HEAD: f"{offset} {length} {start_offset} {status}{carried and ' '}{carried}"}


def head_of(sequence: int, headers: Headers) -> Head:
    found = _HEAD.fullmatch(headers.get(HEAD, ""))
    if found is not None:
        head = Head(sequence, int(found[1]), int(found[2]), int(found[3]), found[4], found[5] or "")
        if head.offset <= head.length and head.start_offset <= head.length:
            return head
    raise _damaged("a message has no valid state of its segment", sequence=sequence, headers=dict(headers))


def carried_in(head: Head) -> dict[str, bytes]:
    """Return the values of the attributes that the head carries, in the order in which they were changed last."""
    values = {}
    for entry in head.carried.split():
        name, is_value, value = entry.partition("=")
        try:
            values[unquote(name, errors="strict")] = base64.b64decode(value, validate=True)
        except ValueError as error:
            raise _damaged("a head carries a value that cannot be read", sequence=head.sequence) from error
        if not name or not is_value:
            raise _damaged("a head carries an attribute without a name or a value", sequence=head.sequence)
    return values


def carrying(values: Mapping[str, bytes]) -> str:
    """Return what `carried_in` reads."""
    return " ".join(f"{_quoted(name)}={base64.b64encode(value).decode()}" for name, value in values.items())


def changes_of(message: Stored) -> int | None:
    """Return how many messages were stored together from this one on; None if it marks a deleted segment."""
    number = message.headers.get(GROUP, "")
    if number == DELETED:
        return None
    if not _COUNT.fullmatch(number):
        raise _damaged("a message has no valid count of changed attributes", of=message)
    return int(number)


def is_carried(message: Stored) -> bool:
    """Return whether the head of the segment holds the attribute's value, and not this message."""
    return message.headers.get(ATTRIBUTE) == CARRIED


def value_of(message: Stored) -> bytes | None:
    """Return the attribute's value; None if it was removed."""
    kind = message.headers.get(ATTRIBUTE)
    if kind not in (SET, REMOVED):
        raise _damaged("a message does not tell whether its attribute is set or removed", of=message)
    return message.data if kind == SET else None


class Subjects:
    """The subjects of one stream."""

    def __init__(self, stream: str) -> None:
        self.stream = stream

    def all(self) -> list[str]:
        return [f"{self.stream}.{kind}.>" for kind in STORED_KINDS]

    def data(self, segment: str) -> str:
        return f"{self.stream}.d.{token(segment)}"

    def changes(self, segment: str) -> str:
        return f"{self.stream}.g.{token(segment)}"

    def attribute(self, segment: str, name: str) -> str:
        return f"{self.stream}.a.{token(segment)}.{token(name)}"

    def attributes(self, segment: str) -> str:
        return f"{self.stream}.a.{token(segment)}.>"

    def news(self, segment: str) -> str:
        return f"{self.stream}.{NEWS_KIND}.{token(segment)}"

    def news_of_all(self) -> Mapping[str, object]:
        return {"src": f"{self.stream}.d.>", "dest": f"{self.stream}.{NEWS_KIND}.>", "headers_only": True}

    def name(self, segment: str) -> str:
        return f"{self.stream}.n.{_levels(segment)}"

    def names(self, prefix: str) -> list[str]:
        """Return filters that match the subjects of all names with the prefix, and of some others."""
        levels = [_level(part) for part in prefix.split("/")[:-1]]
        if not levels or len(levels) >= _MAX_LEVELS or len(".".join(levels)) >= _MAX_TOKEN:
            return [f"{self.stream}.n.>"]
        return [f"{self.stream}.n.{'.'.join(levels)}.>", f"{self.stream}.n.{_DIGEST}.>"]

    def name_at(self, subject: str) -> str | None:
        """Return the name for this subject; None if the name is too long for a subject: then the message holds it."""
        levels = subject.split(".")[2:]
        if not levels:
            raise _damaged("the subject contains no name", subject=subject)
        if levels[0] == _DIGEST:
            return None
        return "/".join("" if level == _EMPTY_TOKEN else unquote(level) for level in levels)


@lru_cache(maxsize=1_000)
def token(name: str) -> str:
    """Return a name of any text as one token of a subject."""
    quoted = _quoted(name)
    return quoted if len(quoted) <= _MAX_TOKEN else _digest(name)


def name_in(subject: str, headers: Headers) -> str:
    """Return the name of the attribute with this subject."""
    last = subject.rpartition(".")[2]
    if last.startswith(_DIGEST):
        last = headers.get(NAME, "")
        if _digest(unquote(last)) != subject.rpartition(".")[2]:
            raise _damaged("a message does not contain the name of its attribute", subject=subject)
    return unquote(last)


def name_header(name: str) -> dict[str, str]:
    """Return the header with the name, for a name that is too long for its subject; else no header."""
    quoted = _quoted(name)
    return {NAME: quoted} if len(quoted) > _MAX_TOKEN else {}


def _levels(name: str) -> str:
    levels = [_level(part) for part in name.split("/")]
    joined = ".".join(levels)
    if len(levels) > _MAX_LEVELS or len(joined) > _MAX_TOKEN:
        return f"{_DIGEST}.{_digest(name)}"
    return joined


def _level(part: str) -> str:
    return _quoted(part) or _EMPTY_TOKEN


def _quoted(name: str) -> str:
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E")


def _digest(name: str) -> str:
    return _DIGEST + hashlib.sha256(name.encode()).hexdigest()


class Stored(NamedTuple):
    """A message as stored by the server."""

    subject: str
    sequence: int
    headers: Headers
    data: bytes


def stored(answer: Mapping[str, Any]) -> Stored:
    """Return the message in an answer of the stream's leader."""
    try:
        message = answer["message"]
        found = Stored(
            message["subject"],
            message["seq"],
            headers_in(base64.b64decode(message.get("hdrs", ""))),
            base64.b64decode(message.get("data", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged("the server's answer is not a message", answer=str(answer)[:200]) from error
    if not isinstance(found.subject, str) or not isinstance(found.sequence, int):
        raise _damaged("the server's answer is not a message", answer=str(answer)[:200])
    return found


_SEQUENCE_AND_HEADERS: Final = re.compile(rb'"seq":(\d{1,19}),"hdrs":"([^"]*)"')


def stored_head(answer: bytes) -> Head | None:
    """Return the head in the leader's answer, without parsing the data; None if the answer has no message."""
    found = _SEQUENCE_AND_HEADERS.search(answer[:65536])
    if found is None:
        return None
    try:
        headers = base64.b64decode(found[2])
    except ValueError as error:
        raise _damaged("the server's answer is not a message", answer=answer[:200]) from error
    return head_of(int(found[1]), headers_in(headers))


def directly_stored(headers: Headers, data: bytes) -> Stored:
    """Return the message in an answer of any replica, which adds headers of its own."""
    sequence = sequence_in(headers)
    if sequence is None or "Nats-Subject" not in headers:
        raise _damaged("the server's answer is not a message", headers=dict(headers))
    return Stored(headers["Nats-Subject"], sequence, headers, data)


def sequence_in(headers: Headers) -> int | None:
    """Return the message's sequence from the server's header; None if it is missing or invalid."""
    found = _SEQUENCE.fullmatch(headers.get("Nats-Sequence", ""))
    return None if found is None else int(found[0])


def number_in(headers: Headers, name: str) -> int:
    """Return a number from the server's header of this name."""
    found = _SEQUENCE.fullmatch(headers.get(name, ""))
    if found is None:
        raise _damaged(f"the server's answer has no valid {name}", headers=dict(headers))
    return int(found[0])


def _damaged(what: str, *, of: Stored | None = None, **facts: object) -> CorruptStoreError:
    if of is not None:
        facts = {"subject": of.subject, "sequence": of.sequence, "headers": dict(of.headers)}
    return CorruptStoreError(
        f"{what}: the data is damaged or another program wrote it; restore the store from a backup", **facts
    )


def request(**fields: object) -> bytes:
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
