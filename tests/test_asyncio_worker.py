"""`samples/asyncio_worker.py` and real signals: the worker finishes what it began, and the next start repeats none."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import readergroup as rg
from tests.places import SAMPLES
from tests.waiting import PATIENCE_SECONDS, until

ORDERS = 400


def test_a_worker_that_is_told_to_end_repeats_and_loses_nothing(tmp_path: Path) -> None:
    mailed = tmp_path / "mailed"
    mailed.touch()

    def numbers() -> list[int]:
        return [int(line) for line in mailed.read_text().splitlines()]

    with rg.connect(f"sqlite:///{tmp_path}/shop.db") as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(2))
        with client.writer("shop/orders", serializer=rg.JsonSerializer()) as writer:
            for number in range(ORDERS):
                writer.write({"order": number}, routing_key=f"customer-{number % 20}")
        client.streams.seal("shop/orders")

        for told in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, None):
            before = len(numbers())
            command = [sys.executable, str(SAMPLES / "asyncio_worker.py"), str(tmp_path), "work"]
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if told is not None:
                until(lambda before=before: len(numbers()) > before + 20, "some mails are sent")
                worker.send_signal(told)
            said, _ = worker.communicate(timeout=PATIENCE_SECONDS)
            assert (worker.returncode, said) == (0, b"")
            assert told is None or len(numbers()) < ORDERS
            assert client.groups.get("mailing").distribution().readers == {}
    assert sorted(numbers()) == list(range(ORDERS))
    for customer in range(20):
        orders = [number for number in numbers() if number % 20 == customer]
        assert orders == sorted(orders)
