"""For tests: a manual clock, a store that fails on demand, fixtures, and the conformance suite for stores."""

from ..clock import ManualClock as ManualClock
from .failing_store import FailingStore as FailingStore
from .failing_store import Operation as Operation
from .fixtures import TwoReplicas as TwoReplicas
from .fixtures import failing_store as failing_store
from .fixtures import manual_clock as manual_clock
from .fixtures import two_replicas as two_replicas
from .instant_clock import InstantClock as InstantClock
from .store_conformance import SegmentStoreConformance as SegmentStoreConformance
