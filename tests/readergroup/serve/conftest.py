"""The web view of the tests waits for a store however busy the machine is."""

from __future__ import annotations

import pytest

from readergroup.serve import application, sampler
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def a_busy_store_is_not_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a sample or a probe that takes some seconds says so."""
    monkeypatch.setattr(sampler, "PATIENCE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(application, "PROBE_SECONDS", PATIENCE_SECONDS)
