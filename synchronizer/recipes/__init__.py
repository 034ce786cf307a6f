"""Ready-made recipes: shared collections, coordination of processes, and durable queues."""

from .collections.shared import SynchronizerOptions as SynchronizerOptions
from .collections.shared import ValueChange as ValueChange
from .collections.shared_config import SharedConfig as SharedConfig
from .collections.shared_counter import SharedCounter as SharedCounter
from .collections.shared_map import EntryChange as EntryChange
from .collections.shared_map import SharedMap as SharedMap
from .collections.shared_set import SetChange as SetChange
from .collections.shared_set import SharedSet as SharedSet
from .coordination.barrier import Barrier as Barrier
from .coordination.election import LeaderElection as LeaderElection
from .coordination.lock import HeldLock as HeldLock
from .coordination.lock import Lock as Lock
from .coordination.lock import Semaphore as Semaphore
from .coordination.membership import Membership as Membership
from .queue.consumer import HandlingLatency as HandlingLatency
from .queue.consumer import QueuedEvent as QueuedEvent
from .queue.dead_letters import DeadEvent as DeadEvent
from .queue.event_processor import EventProcessor as EventProcessor
from .queue.event_processor import EventProcessorOptions as EventProcessorOptions
from .queue.event_queue import EventQueue as EventQueue
