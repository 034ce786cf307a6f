"""``make serve-demo``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any
from urllib.request import urlopen

import pytest

import readergroup as rg
from readergroup.demo.serving import GROUP, Load
from tests.waiting import PATIENCE_SECONDS, until


@pytest.mark.broad
def test_it_serves_a_group_that_works_and_ends_with_an_interrupt() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "readergroup.demo.serving", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split(" ")[0].strip()

        def found() -> dict[str, Any]:
            with urlopen(f"{address}groups/{GROUP}", timeout=PATIENCE_SECONDS) as answer:
                document: dict[str, Any] = json.load(answer)
                return document

        until(lambda: found()["number_of_readers"] >= 3)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_what_happens_in_it_happens(shared_store_url: str) -> None:
    with rg.connect(shared_store_url) as client:
        load = Load(client)
        script = load._script()
        for wanted in (4, 5, 6, 7, 8, 7, 8):
            next(script)()
            next(script)()  # a kill, of no one
            assert len(client.streams.info("demo/orders").segments) == wanted
