"""Processes that begin within milliseconds and share no more with the tests than spawned ones do.

They are forked from one that has imported what most of them need, has opened nothing and runs a single thread.
"""

from __future__ import annotations

import multiprocessing
from typing import Final

CLEAN: Final = multiprocessing.get_context("forkserver")
CLEAN.set_forkserver_preload(
    [
        "hypothesis",
        "pytest",
        "readergroup",
        "synchronizer.stores.nats.store",
        "synchronizer.stores.postgres.store",
        "synchronizer.stores.sqlite.store",
        "tests.waiting",
    ]
)
