"""readergroup for asyncio: the same objects with the same names.

What blocks is awaited, what iterates is ``async for``, and what is a context manager is ``async with``.
docs/howto/use-asyncio.md shows how to use it, and lists its threads.
"""

from .client import Client, connect
from .coordination import Barrier, HeldLock, LeaderElection, Membership
from .groups import ReaderGroup, ReaderGroupManager
from .notifiers import Notifier
from .pool import ReaderPool
from .queues import EventProcessor, EventQueue
from .reader import Reader
from .state import SharedConfig, SharedCounter, SharedMap, SharedSet, StateSynchronizer
from .streams import BatchClient, DeadLetters, StreamManager
from .writer import EventWriter, Transaction

__all__ = [
    "Barrier",
    "BatchClient",
    "Client",
    "DeadLetters",
    "EventProcessor",
    "EventQueue",
    "EventWriter",
    "HeldLock",
    "LeaderElection",
    "Membership",
    "Notifier",
    "Reader",
    "ReaderGroup",
    "ReaderGroupManager",
    "ReaderPool",
    "SharedConfig",
    "SharedCounter",
    "SharedMap",
    "SharedSet",
    "StateSynchronizer",
    "StreamManager",
    "Transaction",
    "connect",
]


def __dir__() -> list[str]:
    """The public names, without the modules that hold them."""
    return __all__
