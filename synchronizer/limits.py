"""The default limit of a state, which a client repeats without loading the state synchronizer."""

from typing import Final

DEFAULT_STATE_LIMIT_BYTES: Final = 1024 * 1024
