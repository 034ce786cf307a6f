"""Ready-made shared states: collections, and what is built on the synchronizer beside them."""

from .shared import SynchronizerOptions as SynchronizerOptions
from .shared import ValueChange as ValueChange
from .shared_config import SharedConfig as SharedConfig
from .shared_counter import SharedCounter as SharedCounter
from .shared_map import EntryChange as EntryChange
from .shared_map import SharedMap as SharedMap
from .shared_set import SetChange as SetChange
from .shared_set import SharedSet as SharedSet
