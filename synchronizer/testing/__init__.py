"""For tests: a manual clock, a store that fails on demand, fixtures, and the conformance suite for stores."""

from ..clock import ManualClock
from .failing_store import FailingStore, Operation
from .fixtures import TwoReplicas, failing_store, manual_clock, two_replicas
from .instant_clock import InstantClock
from .store_conformance import SegmentStoreConformance

__all__ = [
    "FailingStore",
    "InstantClock",
    "ManualClock",
    "Operation",
    "SegmentStoreConformance",
    "TwoReplicas",
    "failing_store",
    "manual_clock",
    "two_replicas",
]


def __dir__() -> list[str]:
    """The public names, without the modules that hold them, for completion in an interpreter."""
    return __all__
