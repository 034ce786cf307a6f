"""A process loads what it uses: not the dependencies, nor the slow modules of Python, of what it does not use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import readergroup as rg
from tests.waiting import PATIENCE_SECONDS

#: The dependencies, those of the extras included, and modules of Python that take long to load.
WATCHED: Final = (
    "apscheduler", "blinker", "isal", "matplotlib", "mmh3", "msgpack", "msgspec", "nats", "notifications",
    "numpy", "opentelemetry", "prometheus_client", "psycopg", "pyarrow", "pydantic", "pyspark", "rich.console", "typer",
    "readergroup.client", "readergroup.batch.client", "readergroup.group.manager", "readergroup.group.reader",
    "readergroup.streams.manager", "readergroup.streams.writing.writer", "synchronizer.state",
    "asyncio", "ctypes", "http", "multiprocessing", "sqlite3", "ssl", "unittest", "xml",
)  # fmt: skip

CONNECT: Final = "import readergroup as rg; client = rg.connect('memory://')"
STREAM: Final = f"{CONNECT}; client.streams.create('shop/orders')"
GROUP: Final = f"{STREAM}; group = client.groups.create('billing', streams=['shop/orders'])"
WRITE: Final = "writer = client.writer('shop/orders'); writer.write(b'x'); writer.close()"

STREAMS: Final = "isal mmh3 msgpack pydantic readergroup.client readergroup.streams.manager synchronizer.state"
COUNTER: Final = "msgpack pydantic readergroup.client synchronizer.state"
GROUP_STATES: Final = f"isal mmh3 {COUNTER} readergroup.group.manager"
GROUPS: Final = f"{STREAMS} readergroup.group.manager"
SQLITE: Final = "ctypes msgpack readergroup.client sqlite3"

#: What a library process loads, by what it does.
LIBRARY: Final = {
    "import": ("import readergroup, notifications", "notifications"),
    "error": ("import readergroup as rg; rg.ReaderGroupError, rg.EndOfDataError", ""),
    "serializer": ("import readergroup as rg; rg.JsonSerializer()", "msgpack pydantic"),
    "connect": (CONNECT, "readergroup.client"),
    "connect to SQLite": ("import readergroup as rg; rg.connect('sqlite:///x.db').close()", SQLITE),
    "write": (f"{STREAM}; {WRITE}", f"{STREAMS} readergroup.streams.writing.writer"),
    "read": (
        f"{GROUP}; {WRITE}; reader = group.reader(); next(iter(reader)); reader.close()",
        f"{GROUPS} readergroup.group.reader readergroup.streams.writing.writer",
    ),
    "list the groups": (f"{CONNECT}; list(client.groups.list())", GROUP_STATES),
    "read in bulk": (
        f"{STREAM}; {WRITE}; list(client.batch.batches(client.batch.segment_ranges('shop/orders')[0]))",
        f"{STREAMS} readergroup.batch.client readergroup.streams.writing.writer",
    ),
    "delete a stream": (f"{STREAM}; client.streams.delete('shop/orders')", STREAMS),
    "count": (f"{CONNECT}; client.counter('visits').add(1)", COUNTER),
    "lock": (f"{CONNECT}; client.lock('report').__enter__()", f"{COUNTER} mmh3"),
}


def loaded_by(program: str, *, folder: object) -> list[str]:
    """The watched modules that a new process loads for ``program``."""
    counted = f"""
import sys
before = set(sys.modules)  # the interpreter itself may have loaded some
try:
    exec({program!r}, {{"__name__": "program"}})
except SystemExit:
    pass
print(*sorted(set({WATCHED!r}) & (set(sys.modules) - before)), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", counted],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        cwd=str(folder),
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1].split()


@pytest.mark.parametrize("does", LIBRARY)
def test_a_process_loads_only_what_it_uses(does: str, tmp_path: object) -> None:
    program, loaded = LIBRARY[does]
    assert loaded_by(program, folder=tmp_path) == sorted(loaded.split())


def test_the_first_listener_loads_the_scheduler_and_no_later_step_does(tmp_path: object) -> None:
    before = loaded_by(GROUP, folder=tmp_path)
    after = loaded_by(f"{GROUP}; group.segment_notifier.wait()", folder=tmp_path)
    assert "apscheduler" not in before and "apscheduler" in after


#: Retries an event, on many threads, and ends when that is done.
RETRY: Final = f"""
import sys, threading
from importlib.machinery import SourceFileLoader

elsewhere, exec_module = [], SourceFileLoader.exec_module

def noted(loader, module):
    if threading.current_thread() is not threading.main_thread():
        elsewhere.append(module.__name__)
    exec_module(loader, module)

SourceFileLoader.exec_module = noted
{GROUP.replace("; ", chr(10))}
for stream in ("shop/again", "shop/dead"):
    client.streams.create(stream)
group.configure(streams=["shop/orders", "shop/again"])
{WRITE.replace("; ", chr(10))}
handled = []

def handle(event):
    handled.append(event)
    if len(handled) == 1:
        raise ValueError("at the first time")
    threading.Timer(0, pool.close).start()

retry = rg.DelayedRetry(delays=[0.1], retry_stream="shop/again", dead_letters="shop/dead")
pool = group.pool(handle, readers=rg.ReaderScalingPolicy(max_readers=2), retry=retry)
pool.run()
print(len(handled), *elsewhere)
"""


def test_no_background_thread_of_a_pool_loads_a_module() -> None:
    """It could not raise in a call of the application if it has no file descriptor to read the module with."""
    done = subprocess.run(
        [sys.executable, "-c", RETRY], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.parametrize("blocked", ["", "import sys; sys.modules['isal'] = None; "])
def test_events_are_the_same_without_the_extra_for_fast_checksums(blocked: str, tmp_path: Path) -> None:
    """What one process writes, the other reads, and both refuse a damaged block."""
    with rg.connect(f"sqlite:///{tmp_path}/x.db") as client:
        client.streams.create("shop/orders")
        client.groups.create("billing", streams=["shop/orders"])
        with client.writer("shop/orders") as writer:
            writer.write(b"from here")
        program = f"""{blocked}
import readergroup as rg
from readergroup.streams.data import block
assert block.crc32.__module__ == {"zlib" if blocked else "isal.isal_zlib"!r}
client = rg.connect("sqlite:///x.db")
with client.writer("shop/orders") as writer:
    writer.write(b"from there")
with client.groups.get("billing").reader() as reader:
    assert reader.read_batch(10, timeout=300).data[0] == b"from here"
damaged = bytearray(block.encode_block([b"x"], written_at=1, writer_id=bytes(16), first_number=1))
damaged[-9] ^= 1
try:
    block.parse_blocks("segment", 0, bytes(damaged))
except rg.CorruptDataError:
    client.close()
"""
        assert "sqlite3" in loaded_by(program, folder=tmp_path)
        (found,) = client.batch.segment_ranges("shop/orders")
        assert [event.data for event in client.batch.read(found)] == [b"from here", b"from there"]


@pytest.mark.parametrize("words", ["--help", "stream --help", "group checkpoint --help", "config get"])
def test_the_help_of_a_command_loads_no_client(words: str, tmp_path: object) -> None:
    """Typer itself loads rich, and since 0.29 pydantic for some options."""
    program = f"import sys; sys.argv = ['readergroup', *{words.split()!r}]; from readergroup.cli import main; main()"
    found = loaded_by(program, folder=tmp_path)
    assert "typer" in found
    assert {*found} <= {"isal", "mmh3", "msgpack", "pydantic", "rich.console", "typer"}


#: What commands load that connect. None needs rich to print into a pipe.
COMMANDS: Final = {
    "config put shop size 5": COUNTER,
    "stream list --json": STREAMS,
    "stream list": STREAMS,
    "group list": GROUP_STATES,
    "group describe billing": GROUPS,
    "peek shop/orders": f"{STREAMS} readergroup.batch.client",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_that_connects_loads_the_parts_of_the_client_that_it_uses(words: str, tmp_path: Path) -> None:
    _create_group(tmp_path)
    expected = {*f"{SQLITE} typer {COMMANDS[words]}".split()}
    assert loaded_by(command(words), folder=tmp_path) == sorted(expected)


def test_a_command_does_not_search_the_installed_distributions(tmp_path: Path) -> None:
    """pydantic does, for plugins, unless they are disabled."""
    _create_group(tmp_path)
    program = f"""
import importlib.metadata
importlib.metadata.distributions = lambda: exit("searched")
{command("stream list")}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_looks_for_no_garbage_while_it_loads_nor_at_its_exit(tmp_path: Path) -> None:
    _create_group(tmp_path)
    program = f"""
import gc
import readergroup.cli

def collections():
    return sum(each["collections"] for each in gc.get_stats())

before = collections()
try:
    {command("group describe billing").replace(chr(10), "; ")}
except SystemExit:
    print(collections() - before, gc.get_freeze_count(), len(gc.get_objects()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=tmp_path
    )
    collections, frozen, others = map(int, done.stdout.splitlines()[-1].split())
    assert collections == 0 and frozen > 10 * others


def command(words: str) -> str:
    """The program of ``readergroup --url sqlite:///x.db`` with these words."""
    arguments = ["readergroup", "--url", "sqlite:///x.db", *words.split()]
    return f"import sys; sys.argv = {arguments!r}\nfrom readergroup.cli import main; main()"


def _create_group(folder: Path) -> None:
    with rg.connect(f"sqlite:///{folder}/x.db") as client:
        client.streams.create("shop/orders")
        client.groups.create("billing", streams=["shop/orders"])
