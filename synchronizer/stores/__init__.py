"""The backends. `open_store` selects one by the address."""

from .opening import open_store as open_store
