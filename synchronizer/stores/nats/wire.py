"""How segments lie in a JetStream stream: subjects, headers, and the state of a segment that its last message tells.

Of a stream ``S`` and a segment's name as a token ``T`` (`token`):

- ``S.d.T`` holds the bytes. Each message says at which offset its bytes begin and, if it is the last one of its append,
  how the segment stands after it (`Head`). So the last message on the subject tells everything, and a publish that
  expects its sequence is a compare-and-set on the whole segment. It is never purged: the sequence to expect would
  start again at 0. What is left of a deleted segment is one such message.
- ``S.a.T.A`` holds the value of the attribute ``A``, alone: each message replaces the one before.
- ``S.g.T`` is written with every change of attributes, first, so that a reader sees that it has them all of one moment.
- ``S.n.…`` is there while the segment exists, under its name split at the slashes, so that names are found by prefix.
  It changes when the segment is sealed or deleted only: a change of attributes alone depends on it, and not on appends.
  The message of a sealed segment is a rollup, that of a deleted one is empty.
- ``S.w.T`` is stored nowhere: the server sends the headers of ``S.d.T`` there, for those who wait.

Whoever may publish to these subjects may have written anything there. What is read is checked here, and what is no
message of this SDK raises `CorruptStoreError`.
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

#: A batch of messages that are stored together holds at most so many.
MAX_BATCH: Final = 1000
#: What the names in one subject may take; longer ones are replaced by their digest. Lines of the protocol end at 4096.
_MAX_TOKEN: Final = 300
_MAX_LEVELS: Final = 16
_DIGEST: Final = "~"
_EMPTY_TOKEN: Final = "%"


class Head(NamedTuple):
    """How a segment stands after the message ``sequence`` of its subject."""

    sequence: int
    offset: int  # of the message's own bytes
    length: int
    start_offset: int
    mark: str

    @property
    def is_sealed(self) -> bool:
        return self.mark == SEALED

    @property
    def is_deleted(self) -> bool:
        return self.mark == DELETED

    @property
    def is_part(self) -> bool:
        """Whether more messages of the same append follow, so that this one does not tell how the segment stands."""
        return self.mark == PART


OPEN: Final = "open"
SEALED: Final = "sealed"
DELETED: Final = "deleted"
PART: Final = "part"
_HEAD: Final = re.compile(rf"([0-9]{{1,19}}) ([0-9]{{1,19}}) ([0-9]{{1,19}}) ({OPEN}|{SEALED}|{DELETED}|{PART})")
_COUNT: Final = re.compile(r"[0-9]{1,9}")
_SEQUENCE: Final = re.compile(r"[0-9]{1,19}")

REMOVED: Final = "removed"
SET: Final = "set"


def head_header(offset: int, length: int, start_offset: int, mark: str) -> dict[str, str]:
    return {HEAD: f"{offset} {length} {start_offset} {mark}"}


def head_of(sequence: int, headers: Headers) -> Head:
    found = _HEAD.fullmatch(headers.get(HEAD, ""))
    if found is not None:
        head = Head(sequence, int(found[1]), int(found[2]), int(found[3]), found[4])
        if head.offset <= head.length and head.start_offset <= head.length:
            return head
    raise _damaged("a message does not say how its segment stands", sequence=sequence, headers=dict(headers))


def changes_of(message: Stored) -> int | None:
    """How many messages were stored together from this one on; None if it says that the segment is deleted."""
    number = message.headers.get(GROUP, "")
    if number == DELETED:
        return None
    if not _COUNT.fullmatch(number):
        raise _damaged("a message does not say how many attributes changed", of=message)
    return int(number)


def value_of(message: Stored) -> bytes | None:
    """The attribute's value; None if it was removed."""
    kind = message.headers.get(ATTRIBUTE)
    if kind not in (SET, REMOVED):
        raise _damaged("a message does not say whether its attribute is set", of=message)
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
        """Filters that find the subjects of all names with the prefix, and of others."""
        levels = [_level(part) for part in prefix.split("/")[:-1]]
        if not levels or len(levels) >= _MAX_LEVELS or len(".".join(levels)) >= _MAX_TOKEN:
            return [f"{self.stream}.n.>"]
        return [f"{self.stream}.n.{'.'.join(levels)}.>", f"{self.stream}.n.{_DIGEST}.>"]

    def name_at(self, subject: str) -> str | None:
        """The name whose subject this is; None if it is too long for a subject and stands in the message."""
        levels = subject.split(".")[2:]
        if not levels:
            raise _damaged("this is no subject of a name", subject=subject)
        if levels[0] == _DIGEST:
            return None
        return "/".join("" if level == _EMPTY_TOKEN else unquote(level) for level in levels)


@lru_cache(maxsize=1_000)
def token(name: str) -> str:
    """A name of any text as one token of a subject."""
    quoted = _quoted(name)
    return quoted if len(quoted) <= _MAX_TOKEN else _digest(name)


def name_in(subject: str, headers: Headers) -> str:
    """The name of the attribute whose subject this is."""
    last = subject.rpartition(".")[2]
    if last.startswith(_DIGEST):
        last = headers.get(NAME, "")
        if _digest(unquote(last)) != subject.rpartition(".")[2]:
            raise _damaged("a message does not say the name of its attribute", subject=subject)
    return unquote(last)


def name_header(name: str) -> dict[str, str]:
    """What a message must say of its name if its subject cannot."""
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
    """A message as the server has stored it."""

    subject: str
    sequence: int
    headers: Headers
    data: bytes


def stored(answer: Mapping[str, Any]) -> Stored:
    """The message in an answer of the stream's leader."""
    try:
        message = answer["message"]
        found = Stored(
            message["subject"],
            message["seq"],
            headers_in(base64.b64decode(message.get("hdrs", ""))),
            base64.b64decode(message.get("data", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged("the server's answer is no message", answer=str(answer)[:200]) from error
    if not isinstance(found.subject, str) or not isinstance(found.sequence, int):
        raise _damaged("the server's answer is no message", answer=str(answer)[:200])
    return found


_SEQUENCE_AND_HEADERS: Final = re.compile(rb'"seq":(\d{1,19}),"hdrs":"([^"]*)"')


def stored_head(answer: bytes) -> Head | None:
    """The head in the leader's answer, without looking at the data; None if there is no such message."""
    found = _SEQUENCE_AND_HEADERS.search(answer[:65536])
    if found is None:
        return None
    try:
        headers = base64.b64decode(found[2])
    except ValueError as error:
        raise _damaged("the server's answer is no message", answer=answer[:200]) from error
    return head_of(int(found[1]), headers_in(headers))


def directly_stored(headers: Headers, data: bytes) -> Stored:
    """The message in an answer of any replica, which has added headers of its own."""
    sequence = sequence_in(headers)
    if sequence is None or "Nats-Subject" not in headers:
        raise _damaged("the server's answer is no message", headers=dict(headers))
    return Stored(headers["Nats-Subject"], sequence, headers, data)


def sequence_in(headers: Headers) -> int | None:
    """What the server says that the message's sequence is."""
    found = _SEQUENCE.fullmatch(headers.get("Nats-Sequence", ""))
    return None if found is None else int(found[0])


def number_in(headers: Headers, name: str) -> int:
    """A number that the server says of its answer."""
    found = _SEQUENCE.fullmatch(headers.get(name, ""))
    if found is None:
        raise _damaged(f"the server's answer does not say its {name}", headers=dict(headers))
    return int(found[0])


def _damaged(what: str, *, of: Stored | None = None, **facts: object) -> CorruptStoreError:
    if of is not None:
        facts = {"subject": of.subject, "sequence": of.sequence, "headers": dict(of.headers)}
    return CorruptStoreError(f"{what}: it is damaged, or another program wrote it; restore a backup", **facts)


def request(**fields: object) -> bytes:
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
