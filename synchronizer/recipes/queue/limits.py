"""The default limit of a queue, which a client repeats without loading the queue."""

from typing import Final

#: Adding waits while more bytes than this are not handled.
MAX_OUTSTANDING_BYTES: Final = 64 * 1024 * 1024
