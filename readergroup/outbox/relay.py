"""`OutboxRelay`: moves the committed rows of an outbox to their streams.

Of all relays of an outbox, one at a time works: the leader of an election in the store of the streams. Its fencing
token makes the appends of a former leader fail (`publishing.py`).

A round takes the first rows of each stream, by their ids, puts them into the stream, and deletes them. It sees only
committed rows. The ids of a key grow in the order of the commits (`table.py`), so no row of a key becomes visible
before one of a lower id that is still to come.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple, Self

from synchronizer import (
    ClosedError,
    InvalidArgumentError,
    LeaderElection,
    LeaseLostError,
    ReaderGroupError,
    StateSynchronizer,
    StoreFullError,
    StoreUnavailableError,
)
from synchronizer.clock import is_manual
from synchronizer.liveness.keeper import Keeper
from synchronizer.loggers import get_logger
from synchronizer.recipes.queue.retries import text_of
from synchronizer.threads.background import BackgroundThread, survive
from synchronizer.threads.flag import Flag

from ..forms import refuses_async
from ..streams.manager import StreamManager
from .moving import StreamMover
from .publishing import Publisher
from .session import Session, is_database_error, is_locked, unavailable
from .state import OutboxState, ReportMoving, ReportStuck
from .table import OutboxTable, table_trouble

#: A stream that does not exist or is sealed is tried again after so long.
_STUCK_RETRY_SECONDS: Final = 2.0
#: How long the relay waits where nothing wakes it: a look at a counter in SQLite, a query in PostgreSQL.
_POLL_SECONDS: Final = 0.02
#: How long a standby, or a relay that the database notifies, waits before it looks by itself.
_LOOK_SECONDS: Final = 5.0
#: The longest uninterruptible wait; the relay notices `close` after it.
_WAIT_SECONDS: Final = 0.25
#: How long `close` waits for the present round, and then, if that does not end, for the end of its lease.
_ROUND_SECONDS: Final = 4.0
_LEAVE_SECONDS: Final = 1.0

_logger = get_logger(__name__)


class _Stuck(NamedTuple):
    """Why a stream takes no events, and when, on the clock, it is tried again."""

    reason: str
    retry_at: float = 0.0


@refuses_async
class OutboxRelay:
    """Moves the events of an outbox to their streams until it is closed. A context manager.

    It works in a background thread. Of all relays of an outbox, in any process, one at a time works; another takes over
    when it closes, or when it has not renewed its lease for ``lease_seconds``. It repeats what fails: no error loses an
    event. The events of a stream that does not exist or is sealed stay in the outbox, and those of other streams go on.
    """

    def __init__(
        self,
        streams: StreamManager,
        table: OutboxTable,
        connect: Callable[[], Session],
        election: LeaderElection,
        state: StateSynchronizer[OutboxState],
        outbox_id: bytes,
    ) -> None:
        self._streams = streams
        self._clock = streams.clock
        self._table = table
        self._connect = connect
        self._election = election
        self._state = state
        self._outbox_id = outbox_id
        self._process_id = os.getpid()
        self._stopping = Flag()
        self._news = Flag()  # the campaign may have ended
        self._is_left_behind = False  # by `close`, which waits once
        self._session: Session | None = None
        self._is_awaiting = False  # a wake-up by the database
        self._data_version: object = None
        self._token: int | None = None
        self._movers: dict[str, StreamMover] = {}
        self._stuck: dict[str, _Stuck] = {}
        self._moved = 0
        self._counters = streams.counters.outboxes[table.name]
        self._keeper = Keeper(
            self._keep,
            name=f"relay of {table.name}",
            clock=self._clock,
            logger=_logger,
            wait=self._wait,
            on_end=lambda _: self._leave(),
            max_pause_seconds=1.0,
        )
        election.on_news(self._news.set)

    def start(self) -> None:
        """Start the thread. `Outbox.relay` calls it, when the client knows the relay."""
        if not is_manual(self._clock):
            self._keeper.start()

    @property
    def is_active(self) -> bool:
        """Whether this relay moves the events, and not one in another process, as far as it knows."""
        return not self._stopping.is_set() and self._election.is_leader

    @property
    def events_moved(self) -> int:
        """The number of events that this relay has put into streams."""
        return self._moved

    def step(self) -> float:
        """Do one round of work in this thread, on a clock that ``is_manual``; return when the next is due."""
        if self._stopping.is_set():
            raise ClosedError("the relay is closed")
        self._campaign()
        due = self._election.step()
        while self._round():
            pass
        return due

    def stop(self) -> None:
        """Stop after the present round, without waiting for it."""
        if os.getpid() == self._process_id:  # a forked child: the relay belongs to the parent
            self._stopping.set()
            self._news.set()
            self._keeper.wake()

    def close(self) -> None:
        """Stop after the present round, and let another relay take over. Closing twice is no error.

        If the database or the store does not answer, the call waits 5 s at most. Another relay then takes over at the
        latest when the lease ends.
        """
        if os.getpid() != self._process_id:
            return  # a forked child: the relay belongs to the parent
        self.stop()
        if is_manual(self._clock):
            self._leave()
        elif not self._is_left_behind and not self._keeper.join(_ROUND_SECONDS):
            _logger.warning(
                "the relay of the outbox %s waits for its database or the store and is left behind; another one takes "
                "over",
                self._table.name,
            )
            leaving = BackgroundThread(self._leave_election, name=f"end of the relay of {self._table.name}")
            with suppress(StoreUnavailableError):  # no thread: the lease expires
                leaving.start()
                self._is_left_behind = True
                leaving.join(_LEAVE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the thread

    def _keep(self) -> float | None:
        if self._stopping.is_set():
            return None
        self._campaign()
        has_moved = self._round()
        now = self._clock.monotonic()
        if has_moved:
            return now
        return now + (_STUCK_RETRY_SECONDS if self._stuck else _LOOK_SECONDS)

    def _campaign(self) -> None:
        if not self._election.is_candidate:
            self._election.campaign(wait=False, timeout=_LOOK_SECONDS)

    def _wait(self, seconds: float) -> None:
        """Wait until there may be something to do."""
        until = self._clock.monotonic() + seconds
        while not self._stopping.is_set() and (left := until - self._clock.monotonic()) > 0:
            if not self._election.is_leader:
                self._clock.wait(self._news, min(left, _WAIT_SECONDS))
                self._news.clear()
                if self._election.is_leader:
                    return
            elif self._look(min(left, _WAIT_SECONDS)):
                return

    def _look(self, seconds: float) -> bool:
        """Return whether the database may have rows to move. Wait up to ``seconds`` if it wakes the relay."""
        session = self._session
        if session is None:
            return True
        try:
            if self._is_awaiting:
                return session.wait_for_notification(seconds)
            self._clock.wait(self._stopping, _POLL_SECONDS)
            if session.dialect == "sqlite":
                before, self._data_version = self._data_version, session.execute("PRAGMA data_version")
                return self._data_version != before
        except Exception as error:
            if is_locked(error):
                return False
            raise self._database_trouble(error) from error
        return True

    def _leave(self) -> None:
        self._forget_session()
        self._leave_election()
        self._state.close()

    def _leave_election(self) -> None:
        with suppress(ReaderGroupError):  # the lease expires
            self._election.close()

    # ------------------------------------------------------------------ a round

    def _round(self) -> int:
        """Move the first rows of each stream; return how many were moved."""
        if not self._election.is_leader:
            self._forget_session()  # the database is to wake another relay
            self._movers.clear()
            return 0
        try:
            self._begin_term(self._election.fencing_token)
            session = self._open_session()
            moved = self._move_all(session)
            if not moved and not self._is_awaiting and session.can_listen:
                self._is_awaiting = self._table.try_to_be_woken(session)
                moved = self._move_all(session)  # of transactions that have not notified
            if moved and self._is_awaiting:
                self._table.wake_no_more(session)
                self._is_awaiting = False
        except LeaseLostError:
            return 0
        except Exception as error:
            if is_locked(error):  # another connection writes to the SQLite database
                self._data_version = None
                return 0
            raise self._database_trouble(error) from error
        return moved

    def _begin_term(self, token: int) -> None:
        if token != self._token:
            self._token = token
            self._movers.clear()
            self._stuck = {stream: _Stuck(reason) for stream, reason in self._state.fetch_updates().stuck.items()}

    def _move_all(self, session: Session) -> int:
        moved, now = 0, self._clock.monotonic()
        for stream in self._table.streams(session):
            if stream in self._stuck and now < self._stuck[stream].retry_at:
                continue
            if self._stopping.is_set():
                break
            try:
                moved += self._move(session, stream)
            except (ClosedError, LeaseLostError, StoreFullError, StoreUnavailableError):
                raise
            except ReaderGroupError as error:
                self._is_stuck(stream, str(error))
            except Exception as error:
                if is_database_error(error):
                    raise
                survive(error, f"relay of {self._table.name}")
                self._movers.pop(stream, None)
                self._is_stuck(stream, text_of(error))
            else:
                self._is_moving(stream)
        return moved

    def _move(self, session: Session, stream: str) -> int:
        mover = self._movers.get(stream)
        if mover is None:
            assert self._token is not None
            publisher = Publisher(self._streams, stream, self._outbox_id, self._token)
            mover = self._movers[stream] = StreamMover(self._table, publisher, self._counters)
        moved = mover.move(session)
        self._moved += moved
        self._counters.events_relayed += moved
        return moved

    # ------------------------------------------------------------------ streams that take no events

    def _is_stuck(self, stream: str, reason: str) -> None:
        known = self._stuck.get(stream)
        if known is None or known.reason != reason:
            _logger.warning("the events for %s wait in the outbox %s: %s", stream, self._table.name, reason)
            self._state.update_state_unconditionally(ReportStuck(stream=stream, reason=reason))
        self._stuck[stream] = _Stuck(reason, self._clock.monotonic() + _STUCK_RETRY_SECONDS)

    def _is_moving(self, stream: str) -> None:
        if stream in self._stuck:
            self._state.update_state_unconditionally(ReportMoving(stream=stream))
            del self._stuck[stream]

    # ------------------------------------------------------------------ the database

    def _open_session(self) -> Session:
        if self._session is None:
            try:
                session = self._connect()
            except (ClosedError, LeaseLostError) as error:  # of the function that connects, and not this relay's
                raise unavailable(error) from error
            try:
                if self._table.outbox_id(session) != self._outbox_id:
                    raise InvalidArgumentError(
                        "the outbox table was emptied or created again; open another relay", table=self._table.name
                    )
                self._table.prepare_to_relay(session)
            except BaseException:
                session.close()
                raise
            self._session = session
            # The server may have lost transactions that were committed, and may give their ids to other rows.
            self._movers.clear()
        return self._session

    def _forget_session(self) -> None:
        session, self._session = self._session, None
        self._is_awaiting = False
        if session is not None:
            session.close()

    def _database_trouble(self, error: Exception) -> Exception:
        """Return the error to raise for one that a call raised, perhaps a driver."""
        if isinstance(error, ReaderGroupError):
            return error
        self._forget_session()
        trouble = table_trouble(error, self._table.name)
        if trouble is not None or not is_database_error(error):
            return trouble or error
        return unavailable(error)
