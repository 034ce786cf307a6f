"""The simulation goes first: it takes longest, so that it is the worst to be waited for at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _HERE not in item.path.parents)
