from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.readergroup.processes_in_one import Process, World, a_world


@pytest.fixture
def world(store_url: str) -> Iterator[World]:
    with a_world(store_url) as world:
        yield world


@pytest.fixture
def process(world: World) -> Process:
    return world.process()
