"""Texts of errors, as they are stored."""

from __future__ import annotations

import pytest

from synchronizer.recipes.queue.retries import text_of


@pytest.mark.parametrize("said", ["x" * 300, "\udcff" * 300, "\udcff" + "é" * 300])
def test_the_text_of_an_error_can_be_stored_and_is_no_longer_than_its_limit(said: str) -> None:
    text = text_of(ValueError(said), 100)
    assert text.startswith("ValueError: ")
    assert len(text) == 100
    assert text.encode()
