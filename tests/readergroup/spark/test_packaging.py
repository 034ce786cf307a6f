"""The recipes of the page on Spark, on a cluster whose workers lack the package: an archive in client mode."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import readergroup as rg
from tests.places import DOCS, ROOT
from tests.readergroup.spark import packed_job
from tests.readergroup.spark.standalone import SPARK, cluster
from tests.readergroup.spark.streams import STREAM, write

#: A cluster and an archive take most of a minute.
pytestmark = pytest.mark.broad
PACKAGES = ("synchronizer", "notifications", "readergroup")
#: What packages have for their own tests, for compilers and for other services. The archive is unpacked several times.
UNUSED = re.compile(r"/(tests|include)/|flight|libarrow_s3|_s3fs")


@pytest.fixture(scope="module")
def master(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("cluster")) as master:
        yield master


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment of the recipe, and its archive. What pip would install is linked from here.

    pip compiles what it installs; without the compiled files each executor would do so.
    """
    folder = tmp_path_factory.mktemp("job")
    venv.create(folder / "environment", symlinks=True)
    (site,) = (folder / "environment" / "lib").glob("python*/site-packages")
    for each in needed("readergroup", {"spark-worker", "postgres"}).values():
        for file in each.files or ():
            if ".." not in file.parts and file.suffix != ".pth" and not UNUSED.search(str(file)):
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                os.link(os.path.realpath(str(file.locate())), site / file)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, site / package, dirs_exist_ok=True)
    pack = [str(Path(sys.executable).parent / "venv-pack"), "-q", "-p", "environment", "-o", "environment.tar.gz"]
    subprocess.run([*pack, "--compress-level", "0"], cwd=folder, check=True, timeout=300)
    return folder


def needed(name: str, extras: set[str]) -> dict[str, Distribution]:
    """The distributions that pip installs for these extras of this one, and itself, by name."""
    found = {name: distribution(name)}
    for requirement in map(Requirement, found[name].requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in {*extras, ""}):
            found |= needed(requirement.name, requirement.extras)
    return found


def test_an_archive_brings_the_package_to_workers_without_it(master: str, folder: Path, postgres_url: str) -> None:
    with rg.connect(postgres_url) as client:
        for stream in (STREAM, "shop/copied"):
            client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
        write(client, range(400))
    (settings,) = re.findall(r"PYSPARK_PYTHON=(\S+)", (DOCS / "spark.md").read_text())[:1]
    options = re.findall(r"(--archives \S+)", (DOCS / "spark.md").read_text())[0].split()
    done = subprocess.run(
        [
            str(SPARK / "bin" / "spark-submit"),
            "--master",
            master,
            *options,
            "--conf",
            "spark.ui.enabled=false",
            packed_job.__file__,
            postgres_url,
            STREAM,
            "shop/copied",
        ],
        cwd=folder,
        env={**os.environ, "PYSPARK_PYTHON": settings, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["read"] == 400
    assert {Path(file).relative_to(cwd).parts[0] for cwd, file in seen["places"]} == {"environment"}
    assert all(Path(cwd) != folder for cwd, _ in seen["places"])
    with rg.connect(postgres_url) as client:
        copied = [event for each in client.batch.segment_ranges("shop/copied") for event in client.batch.read(each)]
    assert len(copied) == 400


@pytest.fixture
def doctor(master: str, folder: Path, postgres_url: str) -> Callable[..., tuple[int, str]]:
    """Runs ``readergroup doctor`` on the cluster; returns its exit code and what it printed."""

    def run(*options: str, python: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "readergroup.cli", "--url", postgres_url, "doctor", "--master", master]
        path = f"{folder / 'environment' / 'bin'}:{os.environ['PATH']}"
        environment = {**os.environ, "PYSPARK_PYTHON": python, "PATH": path, "SPARK_LOCAL_IP": "127.0.0.1"}
        done = subprocess.run(
            [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout

    rg.connect(postgres_url).close()
    return run


def test_the_doctor_says_what_the_executors_have(doctor: Callable[..., tuple[int, str]]) -> None:
    code, said = doctor("--conf", "spark.archives=environment.tar.gz#environment", python="./environment/bin/python")
    assert code == 0, said
    for number in (1, 2):
        assert re.search(rf"^ok +executor {number} .*msgspec .*readergroup \d", said, re.MULTILINE), said
        assert re.search(rf"^ok +executor {number} +the store answers$", said, re.MULTILINE), said


def test_the_doctor_says_that_another_python_lacks_the_package(doctor: Callable[..., tuple[int, str]]) -> None:
    code, said = doctor(python="python3")
    assert code == 1
    for number in (1, 2):
        assert re.search(rf"^missing +executor {number} +no readergroup; see", said, re.MULTILINE), said


def test_the_doctor_says_that_there_is_no_python(doctor: Callable[..., tuple[int, str]]) -> None:
    code, said = doctor(python="./environment/bin/python")
    assert code == 1
    assert re.search(r"^missing +executors +Cannot run program \"./environment/bin/python\"", said, re.MULTILINE), said
