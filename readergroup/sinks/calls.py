"""What a reading thread asks of a sink, also where the sink's database belongs to an event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from synchronizer import StoreUnavailableError

from ..errors import EventStoredError
from ..group.assigned_segments import Claimed
from ..sql.drivers import Dialect
from ..sql.errors import is_passing
from ..sql.scripts import Script, now
from ..streams.config import SegmentId
from ..streams.event import Event
from ..telemetry.counters import GroupCounters
from .place import Place
from .sql_sink import SinkTransaction, SqlSink

R = TypeVar("R")

#: Runs a coroutine on the loop that the database belongs to, and returns its result.
RunOnLoop = Callable[[Coroutine[Any, Any, Any]], Any]


class SinkCalls:
    """The calls of one reader.

    Args:
        sink: The sink.
        counters: Counts the transactions of the reader's group.
        run: For an asynchronous database. Default: it blocks.
        knows_all: Whether each event that the group counts as processed goes through the sink.
        shared: Whether the events of a segment are stored out of order.
    """

    def __init__(
        self,
        sink: SqlSink,
        counters: GroupCounters,
        run: RunOnLoop | None = None,
        *,
        knows_all: bool = False,
        shared: bool = False,
    ) -> None:
        self.knows_all = knows_all
        self._sink = sink
        self._counters = counters
        self._run: RunOnLoop = run or now
        self._shared = shared
        if run is None:
            sink.check_blocks()
        else:
            sink.check_asynchronous()

    def claim(self, group: str, segment: SegmentId, incarnation: str, token: int, offset: int) -> Claimed:
        """See `Claims`."""
        self._sink.counters[group] = self._counters
        place = Place(group, segment, incarnation)
        return self._perform(lambda dialect: self._sink.claiming(dialect, place, token, offset))

    def settle(self, places: Sequence[tuple[Place, int, int]]) -> Sequence[Place]:
        """Move each place, with its token, to a position before which all is stored. Return those that moved."""
        return self._perform(lambda dialect: self._sink.settling(dialect, places))

    def skip(self, event: Event[Any]) -> None:
        """Count the event as stored without an effect."""
        try:
            self._run(_pass_through(SinkTransaction(self._sink, event, shared=self._shared)))
        except EventStoredError:
            pass
        except Exception as error:
            raise _explained(error) from error

    def _perform(self, script: Callable[[Dialect], Script[R]]) -> R:
        try:
            returned: R = self._run(self._sink.database.perform(script))
            return returned
        except Exception as error:
            raise _explained(error) from error


async def _pass_through(transaction: SinkTransaction) -> None:
    await transaction.begin()
    await transaction.commit()


def _explained(error: Exception) -> Exception:
    """Return the error as a reader understands it, which waits for a store that does not answer."""
    if not is_passing(error) or isinstance(error, StoreUnavailableError):
        return error
    return StoreUnavailableError(
        "the sink's database does not answer, or an earlier owner has a transaction open",
        error=f"{type(error).__name__}: {error}".strip(),
    )
