"""Without the extras a client works, and what needs one says which; with them, nothing loads them unasked."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

WORK: Final = """
import sys
import readergroup as rg
with rg.connect("memory://") as client:
    client.streams.create("shop/orders")
    with client.writer("shop/orders") as writer:
        writer.write(b"x")
    client.streams.seal("shop/orders")
    client.groups.create("billing", streams=["shop/orders"]).pool(lambda event: None, concurrency=2).run()
    assert client.telemetry().groups["billing"].events_read == 1
assert not [name for name in sys.modules if name.partition(".")[0] in ("opentelemetry", "prometheus_client")]
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_work_and_its_numbers_load_no_extra() -> None:
    run(WORK)


@pytest.mark.parametrize(
    ("module", "extra", "name"),
    [("prometheus_client", "prometheus", "PrometheusCollector"), ("opentelemetry", "otel", "instrument")],
)
def test_what_is_not_installed_is_named(module: str, extra: str, name: str) -> None:
    run(f"""
import sys
sys.modules[{module!r}] = None
import readergroup as rg, readergroup.telemetry as telemetry
try:
    telemetry.{name}
except rg.UnsupportedError as error:
    assert "pip install '.[{extra}]' in a clone" in str(error)
else:
    raise AssertionError
telemetry.Telemetry
""")
