"""The demo of the main job: many files, a pool of processes, a split, a kill, and a check of every line."""

from .run import DemoFailedError as DemoFailedError
from .run import DemoResult as DemoResult
from .run import run as run
