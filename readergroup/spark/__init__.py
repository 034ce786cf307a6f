"""Streams as a source of Spark: ``readergroup.spark.register(spark)``, then ``spark.read.format("readergroup")``."""

from .requirements import check_java as check_java  # isort: split  # tells what is missing before anything else fails
from .session import local_session as local_session
from .source import register as register
