"""The pages on Spark run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.places import DOCS

PAGES = [DOCS / "spark.md", DOCS / "howto" / "use-event-time.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_runs_as_printed(
    page: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the session of the tests, which `local_session` returns; the paths are its own."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    for path in ("checkpoint", "orders.parquet"):
        text = text.replace(f'"{path}"', f'"{tmp_path}/{path}"')
    namespace: dict[str, object] = {"__name__": "page"}
    for block, shown in re.findall(r"^```python\n(.*?)^```\n+(?:```text\n(.*?)^```)?", text, re.MULTILINE | re.DOTALL):
        exec(block, namespace)
        assert capsys.readouterr().out == shown
    spark.streams.removeListener(namespace["listener"])  # type: ignore[arg-type]
