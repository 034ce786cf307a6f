"""The command that says what is missing, as far as it needs no Spark that runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import readergroup as rg
from readergroup.cli.doctor import file_system_of
from tests.command import app


def doctor(*arguments: str, **environment: str) -> Result:
    given = {"READERGROUP_URL": "", "SPARK_HOME": None, "PYSPARK_DRIVER_PYTHON": None, "PYSPARK_PYTHON": sys.executable}
    return CliRunner(env={**given, **environment}).invoke(app, [*arguments])


def java(folder: Path, version: str) -> str:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"""#!/bin/sh\necho 'openjdk version "{version}"' >&2\n""")
    program.chmod(0o755)
    return str(folder)


def test_nothing_is_missing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    rg.connect(url).close()
    found = doctor("--url", url, "doctor", "--spark", JAVA_HOME=java(tmp_path / "java", "17.0.1"))
    assert found.exit_code == 0, found.stdout
    assert "missing" not in found.stdout
    for text in (
        "the store answers; streams: 0",
        "Z; no newest event is from later",
        "stored events survive a loss of power; processes of one machine share the store",
        "SQLite 3.",
        "pyspark 4.",
        "pyarrow ",
        "Java 17",
        f"PYSPARK_PYTHON {sys.executable}",
    ):
        assert text in found.stdout


@pytest.mark.parametrize(("ahead", "exit_code"), [(0, 0), (35, 1)])
def test_a_clock_that_differs_from_those_of_writers_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, exit_code: int
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    with rg.connect(url) as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(2))
        client.streams.create("shop/payments")
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + ahead)
        with client.writer("shop/orders") as writer:
            writer.write(b"order", "ann")
        monkeypatch.undo()
    found = doctor("--url", url, "doctor")
    assert found.exit_code == exit_code, found.stdout
    told = "an event of shop/orders was written by a machine whose clock is"
    assert (told in found.stdout) == ("ahead of this one; synchronize the clocks" in found.stdout) == bool(ahead)


MOUNTS = """\
overlay / overlay rw,relatime 0 0
nas:/export /srv nfs4 rw,vers=4.2 0 0
/dev/sdb1 /srv/local ext4 rw 0 0
nas:/home /srv/my\\040files cifs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/shop.db", "overlay"),
        ("/srv/shop.db", "nfs4"),
        ("/srv/local/shop.db", "ext4"),
        ("/srv/localized.db", "nfs4"),
        ("/srv/my files/shop.db", "cifs"),
    ],
)
def test_the_file_system_of_a_file_is_found(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


def test_a_file_on_another_machine_is_no_place_for_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"nas:/export {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr("readergroup.cli.doctor._MOUNTS", mounts)
    rg.connect(f"sqlite:///{tmp_path}/shop.db").close()
    found = doctor("--url", f"sqlite:///{tmp_path}/shop.db", "doctor")
    assert found.exit_code == 1 and "is on nfs4, where locks do not work; move the file" in found.stdout


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"JAVA_HOME": "/nowhere"}, "Java: Spark needs Java, which is not installed; install Java 17"),
        ({"SPARK_HOME": "/nowhere"}, "SPARK_HOME: /nowhere has no bin/spark-submit; unset it"),
        ({"PYSPARK_PYTHON": "/nowhere/python"}, "PYSPARK_PYTHON: there is no /nowhere/python; set it to "),
        ({"PYSPARK_DRIVER_PYTHON": "ipython"}, "PYSPARK_DRIVER_PYTHON differs from PYSPARK_PYTHON; unset it"),
        ({"READERGROUP_URL": "sqlite:////nowhere/shop.db"}, "store: "),
        ({"READERGROUP_URL": "memory://"}, "store: a store in memory ends with the command"),
    ],
)
def test_what_is_missing_is_said_in_a_line_and_by_the_exit_code(environment: dict[str, str], text: str) -> None:
    found = doctor("doctor", "--spark", **environment)
    assert found.exit_code == 1
    (line,) = [line for line in found.stdout.splitlines() if text in line]
    assert line.startswith("missing  here ")


def test_a_python_without_the_package_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named readergroup' >&2; exit 1\n")
    python.chmod(0o755)
    found = doctor("doctor", "--spark", PYSPARK_PYTHON=str(python))
    assert found.exit_code == 1
    assert f"{python}: ModuleNotFoundError: No module named readergroup; set it to {sys.executable}" in found.stdout


def test_the_job_does_not_run_if_something_is_missing_here() -> None:
    found = doctor("doctor", "--master", "local[2]", SPARK_HOME="/nowhere")
    assert "not asked; first install what is missing here" in found.stdout
    assert doctor("doctor", "--conf", "a=b").exit_code == 2
    assert doctor("doctor", "--master", "local", "--conf", "a").exit_code == 2
