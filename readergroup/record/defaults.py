"""The defaults of a recording, which a group repeats without loading the recorder."""

from typing import Final

LAG_INTERVAL_SECONDS: Final = 60.0
RETENTION_SECONDS: Final = 30 * 24 * 3600.0
RETENTION_BYTES: Final = 64 * 1024 * 1024
