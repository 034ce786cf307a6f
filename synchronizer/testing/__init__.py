"""For tests: a clock to move by hand, a store that fails on demand, and the suite that every store passes."""

from ..clock import ManualClock as ManualClock
from .failing_store import FailingStore as FailingStore
from .failing_store import Operation as Operation
from .store_conformance import SegmentStoreConformance as SegmentStoreConformance
