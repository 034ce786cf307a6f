"""The backends. `open_store` picks one by the address."""

from .opening import open_store as open_store
