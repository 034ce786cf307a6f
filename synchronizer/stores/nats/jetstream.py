"""The JetStream stream of a store: created if it does not exist, and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from synchronizer.clock import Deadline, SystemClock
from synchronizer.errors import (
    AlreadyExistsError,
    CorruptStoreError,
    InvalidArgumentError,
    NotFoundError,
    StoreFullError,
    StorePermissionError,
    UnsupportedError,
)
from synchronizer.threads.flag import Flag

from .connection import AnswerLostError, NatsConnection, NotSentError
from .frames import Answer, Outgoing, error_in
from .rights import Api
from .wire import EXPECTED, Subjects

FORMAT: Final = "1"
_FORMAT: Final = "readergroup.format"
#: The codes of errors for which a server, an account or a disk is full.
FULL: Final = (10002, 10023, 10028, 10047, 10077)
_NOT_FOUND: Final = 10059
_OTHER_CONFIGURATION: Final = 10058
_NO_JETSTREAM: Final = (10039, 10076)
_TOO_FEW_SERVERS: Final = (10005, 10074)
#: The server could not create the stream for a reason that only its log names, as one of its folder.
_NOT_CREATED: Final = 10049
#: The name in the subject of the probe for a leader. A segment may have this name.
_PROBE: Final = "leader"
_LOOK_SECONDS: Final = 0.02
#: Requests about the stream itself are repeated after this time without an answer.
_ANSWER_SECONDS: Final = 1.0
#: A creation that fails on the server is repeated for this time.
_CREATION_SECONDS: Final = 2.0
_NEEDED: Final[Mapping[str, object]] = {
    "retention": "limits",
    "discard": "new",  # a full stream refuses, and never gives up what is old
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "allow_direct": True,
    "allow_rollup_hdrs": True,
    "allow_atomic": True,
}


class JetStream:
    """The stream that ``subjects`` names, on the servers of ``connection``."""

    def __init__(self, connection: NatsConnection, subjects: Subjects, url: str, timeout_seconds: float) -> None:
        self._connection = connection
        self._subjects = subjects
        self._api = Api(subjects.stream)
        self._url = url
        self._timeout_seconds = timeout_seconds

    def open(self, replicas: int | None, max_bytes: int, must_exist: bool) -> int:
        """Create the stream if needed, check that it fits a store, and return the number of its replicas."""
        answer = self._manage(self._api.info)
        if error_in(answer)[0] == _NOT_FOUND:
            if must_exist:
                raise NotFoundError(
                    "there is no store on these servers; correct the address, or create a store there",
                    url=self._url,
                    stream=self._subjects.stream,
                )
            answer = self._create(replicas or 1, max_bytes)
            if error_in(answer)[0] == _OTHER_CONFIGURATION:  # another process was faster, with another address
                answer = self._manage(self._api.info)
        if "error" in answer:
            raise self._cannot_open(*error_in(answer))
        configuration = answer.get("config")
        if not isinstance(configuration, dict) or not isinstance(configuration.get("num_replicas"), int):
            raise CorruptStoreError("the server's answer has no configuration of the stream", url=self._url)
        self._check_configuration(configuration, replicas)
        self._await_leader()
        return int(configuration["num_replicas"])

    def _create(self, replicas: int, max_bytes: int) -> dict[str, Any]:
        """Return the answer to the creation of the stream.

        A server that has just deleted the last stream of an account removes its folder a little later, and cannot
        create another stream at that moment.
        """
        deadline = Deadline(SystemClock(), min(_CREATION_SECONDS, self._timeout_seconds))
        nobody = Flag()
        while True:
            answer = self._manage(self._api.create, _configuration(self._subjects, replicas, max_bytes))
            if error_in(answer)[0] != _NOT_CREATED or deadline.passed:
                return answer
            SystemClock().wait(nobody, _LOOK_SECONDS)

    def _await_leader(self) -> None:
        """Return when appends reach the leader: a new stream has none at first, and not all servers know it.

        The probe has an impossible expectation, so it is never stored.
        """
        impossible = Outgoing(self._subjects.data(_PROBE), b"", {EXPECTED: str(1 << 62)})
        deadline = Deadline(SystemClock(), self._timeout_seconds)
        nobody = Flag()
        while True:
            if not self._insistently(impossible).is_from_nobody:
                return
            if deadline.passed:
                raise self._connection.unavailable("no server leads the stream; try again")
            SystemClock().wait(nobody, _LOOK_SECONDS)

    def _manage(self, subject: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        answer = self._insistently(Outgoing(subject, json.dumps(body).encode() if body else b""))
        if answer.is_from_nobody:
            if not self._connection.has_jetstream:
                raise self._no_jetstream()
            raise self._connection.unavailable("JetStream accepts no requests; try again")
        return answer.document

    def _insistently(self, message: Outgoing) -> Answer:
        """Return the answer to a message that may be sent repeatedly, and retry until the timeout.

        While a stream is being created, each server of a cluster may leave the answer to another one.
        """
        deadline = Deadline(SystemClock(), self._timeout_seconds)
        nobody = Flag()
        while True:
            try:
                return self._connection.exchange([message], deadline.remaining(_ANSWER_SECONDS))[0][0]
            except (NotSentError, AnswerLostError) as error:
                failed = self._connection.failed(error)
                if deadline.passed or isinstance(failed, StorePermissionError):
                    raise failed from error
            SystemClock().wait(nobody, _LOOK_SECONDS)

    def _cannot_open(self, code: int | None, description: str) -> Exception:
        if code in _NO_JETSTREAM:
            return self._no_jetstream()
        if code in _TOO_FEW_SERVERS:
            return UnsupportedError(
                "there are fewer servers than replicas; start more servers, or use 'replicas=1'",
                url=self._url,
                server_says=description,
            )
        if code in FULL:
            return StoreFullError(
                "the account has no space for the stream; raise its limits, or lower 'max_bytes'",
                url=self._url,
                server_says=description,
            )
        return self._connection.unavailable(f"the stream cannot be opened: {description} ({code})")

    def _no_jetstream(self) -> UnsupportedError:
        return UnsupportedError("the server or the account has no JetStream; enable it", url=self._url)

    def _check_configuration(self, configuration: Mapping[str, Any], replicas: int | None) -> None:
        found = (configuration.get("metadata") or {}).get(_FORMAT)
        if found is None:
            raise AlreadyExistsError("the stream is not a store of this SDK; name another stream", url=self._url)
        if found != FORMAT:
            raise UnsupportedError(
                "the stream has a format that this release does not know; upgrade to the release that created it, or "
                "name another stream",
                url=self._url,
                format=found,
                known=FORMAT,
            )
        missing = [name for name, value in _NEEDED.items() if configuration.get(name) != value]
        if missing:
            raise UnsupportedError(
                "the stream lacks settings that a store needs, as on servers before 2.12; create it anew on "
                "newer servers",
                url=self._url,
                missing=missing,
            )
        if replicas not in (None, configuration["num_replicas"]):
            raise InvalidArgumentError(
                "the stream has another number of replicas; remove the option, or change the stream (nats "
                "stream edit --replicas)",
                url=self._url,
                replicas=configuration["num_replicas"],
                asked=replicas,
            )


def _configuration(subjects: Subjects, replicas: int, max_bytes: int) -> Mapping[str, object]:
    return {
        **_NEEDED,
        "name": subjects.stream,
        "subjects": subjects.all(),
        "storage": "file",
        "num_replicas": replicas,
        "max_bytes": max_bytes,
        "republish": subjects.news_of_all(),
        "duplicate_window": 100_000_000,  # ns; no message has an id
        "metadata": {_FORMAT: FORMAT},
    }
