"""Encodes messages to a NATS server and decodes messages from it, as its protocol defines them.

This module checks everything that goes into a frame: a line end in a subject or a header would end the frame, and the
server would take the rest for a command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pydantic_core import from_json

from synchronizer.errors import CorruptStoreError, InvalidArgumentError

Headers = Mapping[str, str]

_HEADERS_BEGIN: Final = b"NATS/1.0\r\n"
_VERSION_LENGTH: Final = len(b"NATS/1.0")
_NO_RESPONDERS: Final = "503"
#: Visible ASCII characters. Names that become subjects have all other characters quoted.
_SUBJECT: Final = re.compile(r"[!-~]+")


class Outgoing(NamedTuple):
    """A message to the server."""

    subject: str
    data: bytes = b""
    headers: Headers | None = None
    has_answer: bool = True
    has_many_answers: bool = False  # the last one has a status


class Answer(NamedTuple):
    headers: Headers
    data: bytes
    status: str | None = None

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document in the answer's data."""
        try:
            found = from_json(self.data)
        except ValueError as error:
            raise CorruptStoreError("an answer of the NATS server is not JSON", answer=self.data[:200]) from error
        if not isinstance(found, dict):
            raise CorruptStoreError("an answer of the NATS server is not a JSON object", answer=self.data[:200])
        return found

    @property
    def is_from_nobody(self) -> bool:
        """Whether the server found no recipient for the message, so that it had no effect."""
        return self.status == _NO_RESPONDERS


def error_in(document: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return the code and the description of the error in an answer of JetStream; None and "" if there is none."""
    error = document.get("error")
    if not isinstance(error, dict):
        return None, "" if error is None else str(error)
    code = error.get("err_code")
    return (code if isinstance(code, int) else None), str(error.get("description", "an error"))


def framed(message: Outgoing, reply: bytes) -> bytes:
    """Return the frame of the message; raise `InvalidArgumentError` if it would be more than one message."""
    subject, data, headers = message.subject, message.data, message.headers
    if not _SUBJECT.fullmatch(subject):
        raise InvalidArgumentError("a subject must consist of visible ASCII characters", subject=subject)
    if headers is None:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply, len(data), data)
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode()
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
        raise InvalidArgumentError("a header must not contain a line end", headers=dict(headers))
    size = len(_HEADERS_BEGIN) + len(lines) + 2
    return b"HPUB %b %b %d %d\r\n%b%b\r\n%b\r\n" % (
        subject.encode(),
        reply,
        size,
        size + len(data),
        _HEADERS_BEGIN,
        lines,
        data,
    )


def answer_of(block: bytes | None, data: bytes) -> Answer:
    """Return the answer with this block of headers, which may have a status in its first line.

    Never raises: it replaces bytes that are not text, and skips lines that are not headers.
    """
    if not block:
        return Answer({}, data)
    return Answer(headers_in(block), data, _status_in(block))


def headers_in(block: bytes) -> dict[str, str]:
    lines = block.decode("utf-8", "replace").split("\r\n")[1:]
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}


def _status_in(block: bytes) -> str | None:
    """Return the three digits after the protocol's version. A header named Status is user data, not this status."""
    words = block[_VERSION_LENGTH : block.find(b"\r\n")].split(maxsplit=1)
    return words[0].decode("ascii", "replace") if words else None
