"""``readergroup doctor``: what is missing, and where."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import typer

import readergroup as rg
from synchronizer import ReaderGroupError, UnsupportedError
from synchronizer.arguments import check_duration
from synchronizer.extras import install_hint

from ..java import check_java
from .peeking import newest_events
from .screen import print_json, say
from .session import Failed, Session, WrongUsage
from .streams import AsJson
from .times import shown_time

#: The packages that a task imports, and their oldest versions that are checked.
_PACKAGES: Final[Mapping[str, tuple[int, ...]]] = {"pyspark": (4, 2), "pyarrow": (19,), "msgspec": (0, 19)}
_HERE: Final = "here"
#: In how many streams the times of the newest events are compared with the clock, and how far they may be ahead.
_CLOCK_STREAMS: Final = 20
_CLOCK_TOLERANCE: Final = timedelta(seconds=1)
#: Where Linux lists its file systems.
_MOUNTS: Final = Path("/proc/mounts")
#: File systems of other machines. The locks and the shared memory of SQLite do not work there.
_REMOTE: Final = frozenset(
    {"9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "glusterfs", "lustre"}
    | {"nfs", "nfs4", "smb3", "smbfs"}
)
#: What Spark writes of a Python that cannot run a task, among much else.
_CAUSES: Final = (
    r"Cannot run program \"[^\"]*\"",
    r"ModuleNotFoundError: .*",
    r"\[PYTHON_VERSION_MISMATCH\] [^.]*\.[^.]*\.[^.]*",
    r"cancelled as part of cancellation of all jobs",
    r"\[[A-Z_.]+\] .*",
)


class Check(NamedTuple):
    """One thing that was looked at."""

    is_fine: bool
    where: str
    text: str


def doctor(
    context: typer.Context,
    spark: Annotated[bool, typer.Option("--spark", help="Check what the Spark format needs on this machine.")] = False,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Also run a small job on this Spark, such as spark://head:7077, local[2] or sc://head:15002, and check"
            " its executors.",
            show_default=False,
        ),
    ] = None,
    conf: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A setting of that Spark, such as spark.archives=environment.tar.gz#environment."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that the job may take.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Say what is missing, and where: the store, and with --spark all that Spark needs.

    The exit code is 1 if something is missing.
    """
    check_duration(timeout, "--timeout")
    settings = _settings(conf or [])
    if conf and master is None:
        raise WrongUsage("--conf is for the Spark of --master; name it")
    session: Session = context.obj
    missing = 0
    found = []
    for check in _checks(session, spark or master is not None, master, settings, timeout):
        missing += not check.is_fine
        found.append(check._asdict())
        if not as_json:
            say(f"{'ok' if check.is_fine else 'missing':8} {check.where:12} {check.text}")
    if as_json:
        print_json(found)
    if missing:
        raise typer.Exit(1)


def _settings(given: list[str]) -> Mapping[str, str]:
    if wrong := [each for each in given if "=" not in each]:
        raise WrongUsage(f"--conf takes NAME=VALUE: {wrong[0]}")
    return dict(each.split("=", 1) for each in given)


def _checks(
    session: Session, spark: bool, master: str | None, settings: Mapping[str, str], timeout: float
) -> Iterator[Check]:
    from importlib.metadata import version  # slow, and no other command needs it

    yield Check(True, _HERE, f"readergroup {version('readergroup')}, Python {platform.python_version()}")
    if session.url:
        yield from _store(session)
    if spark:
        here = list(_spark_here())
        yield from here
        if master is not None:
            if all(check.is_fine for check in here):
                yield from _executors(session.url, master, settings, timeout)
            else:
                yield Check(False, "executors", "not asked; first install what is missing here")


def _store(session: Session) -> Iterator[Check]:
    try:
        with session.connect() as client:
            streams, url, guarantees = list(client.streams.list()), client.store.url, client.store.guarantees
            clock = _clock(client, streams[:_CLOCK_STREAMS])
    except (Failed, ReaderGroupError) as error:
        yield Check(False, _HERE, f"store: {error}")
        return
    yield Check(True, _HERE, f"the store answers; streams: {len(streams)}")
    yield clock
    safety = "survive a loss of power" if guarantees.durable else "may be lost if the servers lose power"
    waiting = "woken" if guarantees.push else "not woken: they poll"
    reach = "of many machines" if guarantees.many_hosts else "of one machine"
    yield Check(True, _HERE, f"stored events {safety}; processes {reach} share the store and are {waiting}")
    if url.startswith("sqlite:"):
        yield Check(True, _HERE, f"SQLite {importlib.import_module('sqlite3').sqlite_version}")
        if _MOUNTS.exists():
            yield _file_system(Path(unquote(urlsplit(url).path[1:])).resolve())


def _clock(client: rg.Client, streams: list[str]) -> Check:
    """Compare the clock with those of the writers of the newest events."""
    times = [(event.written_at, stream) for stream in streams for event in newest_events(client, stream, 1)]
    now = datetime.fromtimestamp(client.clock.time(), UTC)
    newest, stream = max(times, default=(now, ""))
    if newest > now + _CLOCK_TOLERANCE:
        ahead = (newest - now).total_seconds()
        text = (
            f"clock: an event of {stream} was written by a machine whose clock is {ahead:.0f} s ahead of this one; "
            "synchronize the clocks"
        )
        return Check(False, _HERE, text)
    return Check(True, _HERE, f"clock {shown_time(now)}; no newest event is from later")


def _file_system(path: Path) -> Check:
    kind = file_system_of(path, _MOUNTS.read_text("utf-8", errors="replace"))
    if kind in _REMOTE:
        text = f"file system: {path} is on {kind}, where locks do not work; move the file to a local disk"
        return Check(False, _HERE, text)
    return Check(True, _HERE, f"file system {kind}")


def file_system_of(path: Path, mounts: str) -> str:
    """Return the kind of the file system that the path is on; ``mounts`` is the text of /proc/mounts."""
    found, kind = Path("/"), "unknown"
    for line in mounts.splitlines():
        _, place, type_, *_ = line.split(" ")
        mounted = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), place))
        if path.is_relative_to(mounted) and len(mounted.parts) >= len(found.parts):  # the last one hides the others
            found, kind = mounted, type_
    return kind


def _spark_here() -> Iterator[Check]:
    for package, oldest in _PACKAGES.items():
        yield _package(package, oldest)
    try:
        yield Check(True, _HERE, f"Java {check_java()}")
    except UnsupportedError as error:
        yield Check(False, _HERE, f"Java: {error}")
    if (home := os.environ.get("SPARK_HOME")) is not None:
        yield _spark_home(Path(home))
    yield _worker_python()


def _package(name: str, oldest: tuple[int, ...]) -> Check:
    try:
        version = str(importlib.import_module(name).__version__)
    except ImportError as error:
        return Check(False, _HERE, f"{name}: {error}; {install_hint('spark')}")
    if tuple(map(int, re.findall(r"\d+", version)[: len(oldest)])) < oldest:
        needed = ".".join(map(str, oldest))
        return Check(False, _HERE, f"{name} {version} is older than {needed}; pip install --upgrade {name}")
    return Check(True, _HERE, f"{name} {version}")


def _spark_home(home: Path) -> Check:
    if not (home / "bin" / "spark-submit").exists():
        return Check(False, _HERE, f"SPARK_HOME: {home} has no bin/spark-submit; unset it")
    cores = [re.search(r"spark-core_[\d.]+-(\d+\.\d+)", jar.name) for jar in home.glob("jars/spark-core_*.jar")]
    versions = {found[1] for found in cores if found}
    installed = ".".join(str(_imported("pyspark")).split(".")[:2])
    if versions and installed not in versions:
        return Check(False, _HERE, f"SPARK_HOME has Spark {versions.pop()}, and PySpark is {installed}; unset it")
    return Check(True, _HERE, f"SPARK_HOME {home}")


def _imported(package: str) -> str | None:
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError:
        return None


def _worker_python() -> Check:
    """Check the Python that Spark starts for its planner here; executors start the one of the same path there."""
    own, workers = (os.environ.get(name) for name in ("PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON"))
    if own and workers and own != workers:
        return Check(False, _HERE, "PYSPARK_DRIVER_PYTHON differs from PYSPARK_PYTHON; unset it")
    name = "PYSPARK_DRIVER_PYTHON" if own else "PYSPARK_PYTHON"
    python = own or workers or "python3"
    if shutil.which(python) is None:
        return Check(False, _HERE, f"{name}: there is no {python}; set it to {sys.executable}")
    asked = "import sys, readergroup, pyarrow, msgspec; print('%d.%d' % sys.version_info[:2])"
    try:
        # In a folder without packages, which a Python finds too.
        command = [str(Path(shutil.which(python) or python).absolute()), "-c", asked]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(False, _HERE, f"{name}: {error}; set it to {sys.executable}")
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it fails"])[-1]
        return Check(False, _HERE, f"{name} {python}: {why}; set it to {sys.executable}")
    if (version := done.stdout.strip()) != "{}.{}".format(*sys.version_info):
        return Check(False, _HERE, f"{name} {python} is Python {version}; set it to {sys.executable}")
    return Check(True, _HERE, f"{name} {python}")


def _executors(url: str | None, master: str, settings: Mapping[str, str], timeout: float) -> Iterator[Check]:
    from ..spark.executors import executor_reports, session
    from ..spark.stderr import stderr_in

    packages = [*_PACKAGES, "readergroup"]
    try:
        with stderr_in(Path(os.devnull)):
            spark = session(master, settings)
            try:
                reports = executor_reports(spark, packages, url, timeout)
            finally:
                spark.stop()
    except Exception as error:
        yield Check(False, "executors", _cause(error, timeout))
        return
    for number, report in enumerate(reports, 1):
        where = f"executor {number}"
        versions = ", ".join(f"{name} {version}".strip() for name, version in report.packages.items() if version)
        yield Check(True, where, f"{report.host}: Python {report.python}, {versions}")
        for name, version in report.packages.items():
            if version is None:
                yield Check(False, where, f"no {name}; see 'On a cluster' in docs/spark.md")
        if report.error is not None:
            yield Check(False, where, f"store: {report.error}")
        elif url is not None and None not in report.packages.values():
            yield Check(True, where, "the store answers")


def _cause(error: Exception, timeout: float) -> str:
    """Return what went wrong in a line: Spark's errors have hundreds."""
    for pattern in _CAUSES:
        if found := re.search(pattern, str(error)):
            if "cancel" in found[0]:
                return f"they did not answer in {timeout:g} s; is there one, with a free core?"
            return found[0]
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
