"""The page on Spark runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.places import DOCS

PAGE = DOCS / "spark.md"


def test_the_page_runs_as_printed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the session of the tests, which `local_session` returns; the paths are its own."""
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    for path in ("checkpoint", "orders.parquet"):
        page = page.replace(f'"{path}"', f'"{tmp_path}/{path}"')
    namespace: dict[str, object] = {"__name__": "page"}
    for block, shown in re.findall(r"^```python\n(.*?)^```\n+(?:```text\n(.*?)^```)?", page, re.MULTILINE | re.DOTALL):
        exec(block, namespace)
        assert capsys.readouterr().out == shown
    spark.streams.removeListener(namespace["listener"])  # type: ignore[arg-type]
