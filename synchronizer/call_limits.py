"""How long a call of a store waits for a server that does not answer, while its caller has a deadline.

A store has a limit of its own, which leaves time for what is slow. A caller with less time, such as one that closes
something, would wait for that limit several times.
"""

from __future__ import annotations

import threading
from typing import Final

from .clock import Deadline

#: A call has this time, however early the deadline is: a server may be slow, and the connection is lost with the call.
LEAST_SECONDS: Final = 5.0


class CallLimit(threading.local):
    """The deadline of the caller in this thread. Set it, and set what was there again."""

    deadline: Deadline | None = None

    def seconds(self, usual: float) -> float:
        """Return how long a call of the store that may take the ``usual`` time waits for its answer."""
        return usual if self.deadline is None else min(usual, max(LEAST_SECONDS, self.deadline.remaining(usual)))


call_limit: Final = CallLimit()
