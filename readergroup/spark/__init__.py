"""Streams as a source and a sink of Spark: ``register(spark)``, then ``spark.read.format("readergroup")``."""

from .requirements import check_java as check_java  # first: it reports missing packages

# isort: split
from .copying import copy as copy
from .listener import ProgressListener as ProgressListener
from .listener import QueryProgress as QueryProgress
from .session import local_session as local_session
from .source import register as register
