"""The default of writers that note times, which a client repeats without loading a writer."""

from typing import Final

#: After how many seconds without a note a writer counts no more.
EVENT_TIME_TIMEOUT_SECONDS: Final = 60.0
MAX_EVENT_TIME_TIMEOUT_SECONDS: Final = 86_400.0
