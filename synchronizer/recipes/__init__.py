"""Ready-made shared states: collections, and what is built on the synchronizer beside them."""

from .barrier import Barrier as Barrier
from .dead_letters import DeadEvent as DeadEvent
from .election import LeaderElection as LeaderElection
from .event_consumer import HandlingLatency as HandlingLatency
from .event_consumer import QueuedEvent as QueuedEvent
from .event_processor import EventProcessor as EventProcessor
from .event_processor import EventProcessorOptions as EventProcessorOptions
from .event_queue import MAX_OUTSTANDING_BYTES as MAX_OUTSTANDING_BYTES
from .event_queue import EventQueue as EventQueue
from .lock import HeldLock as HeldLock
from .lock import Lock as Lock
from .lock import Semaphore as Semaphore
from .membership import Membership as Membership
from .shared import SynchronizerOptions as SynchronizerOptions
from .shared import ValueChange as ValueChange
from .shared_config import ConfigEntries as ConfigEntries
from .shared_config import SharedConfig as SharedConfig
from .shared_counter import SharedCounter as SharedCounter
from .shared_map import EntryChange as EntryChange
from .shared_map import SharedMap as SharedMap
from .shared_set import SetChange as SetChange
from .shared_set import SharedSet as SharedSet
