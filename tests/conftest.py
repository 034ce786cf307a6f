"""What holds for all tests, and the stores that they run on.

A test that takes ``store_url`` runs on the memory store, one that takes ``shared_store_url`` on a SQLite file. One with
the mark ``stores`` runs on all but the cluster, or on those that the mark names; with ``stores(round_robin=True)`` on
that first one, and every second test on another too, so that of many such tests each store gets its share. With
``--stores=all``, or names with commas, all of them run on each, and no other tests do: ``make test-stores``.

A test or a parameter with the mark ``broad`` is the wide form of another one that runs every time: more seeds, more
schedules, another place or store. It runs with ``--broad``, or on the stores of ``--stores``; ``make test-stores``
gives both. With ``--broad`` each property of Hypothesis runs too, with ten times as many examples.

The servers are real ones of the tests' own, started when the first test asks for them, one of each for all processes of
the run. What ``READERGROUP_TEST_URLS`` names, addresses with spaces between them, comes on top and is for all tests:
each makes a store of its own there and removes it again.

The tests of Spark share one session, which takes all processors: with ``-n`` they are left out, and with ``--spark``
there are no others.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import uuid
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import settings

from synchronizer import background_errors
from tests.servers.fresh import fresh_database, fresh_store
from tests.servers.in_memory import folder_in_memory
from tests.servers.nats import NatsCluster, NatsServer
from tests.servers.postgres import PostgresServer
from tests.servers.shared import Server, SharedServers
from tests.servers.unavailable import ServerUnavailable

#: What starts the server of a store.
SERVERS: dict[str, Callable[[], Server]] = {
    "postgresql": PostgresServer,
    "nats": NatsServer,
    "nats-cluster": NatsCluster,
}
OWN_URLS = os.environ.get("READERGROUP_TEST_URLS", "").split()
ALL_STORES = ["memory", "sqlite", *SERVERS, *OWN_URLS]
#: One of these is the backend of another one with more servers: in every run, only tests that name it run on it.
ONLY_IF_NAMED = {"nats-cluster"}
#: Stores that processes share.
SHARED_STORES = ALL_STORES[1:]
SPARK_TESTS = Path(__file__).parent / "readergroup" / "spark"
#: What the files of the tests that run at one time may take in memory.
ROOM = 2 * 1024**3
PARAMETERS = {"store_url": ALL_STORES, "shared_store_url": SHARED_STORES}

SHARED_SERVERS = pytest.StashKey[SharedServers]()


# ---------------------------------------------------------------------- which tests run on which stores


def pytest_addoption(parser: pytest.Parser) -> None:
    help = f"run the tests that take a store, on all of these: {','.join(ALL_STORES[:5])}, or all"
    parser.addoption("--stores", metavar="NAMES", help=help)
    parser.addoption("--broad", action="store_true", help="run the tests with the mark broad, and no others")
    parser.addoption("--spark", action="store_true", help="run the tests of Spark, and no others")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("PYTHONUNBUFFERED", None)  # with it, what a command forgets to flush would be seen all the same
    # How long one example takes says something about the machine, and nothing about the code.
    settings.register_profile("of this run", deadline=None, max_examples=300 if config.getoption("--broad") else 30)
    settings.load_profile("of this run")
    config.addinivalue_line("markers", "unexpected_errors: it makes errors that threads and stores do not know")
    config.addinivalue_line("markers", "stores(*names, round_robin=False): the stores it runs on in every run, or all")
    config.addinivalue_line("markers", "broad: it takes long, and a narrower one runs every time; runs with --broad")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for parameter, possible in PARAMETERS.items():
        if parameter in metafunc.fixturenames:
            stores = _stores_of(metafunc, possible)
            metafunc.parametrize(parameter, stores, indirect=True)


def _stores_of(metafunc: pytest.Metafunc, possible: Sequence[str]) -> list[object]:
    wide: Sequence[str] = ()
    if named := metafunc.config.getoption("--stores"):
        wanted = possible if named == "all" else named.split(",")
        if unknown := {*wanted} - {*ALL_STORES}:
            raise pytest.UsageError(f"--stores: there is no {', '.join(unknown)}; there are {', '.join(ALL_STORES)}")
    elif mark := metafunc.definition.get_closest_marker("stores"):
        some = [store for store in possible if store not in ONLY_IF_NAMED]
        wanted = mark.args or some
        if unknown := {*mark.kwargs} - {"round_robin"}:
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: stores has no {', '.join(unknown)}")
        if mark.kwargs.get("round_robin"):
            wanted, wide = _round_robin(metafunc, some)
    else:
        wanted = possible[:1]
    return [
        pytest.param(store, id=_label(store), marks=[pytest.mark.broad] if store in wide else [])
        for store in possible
        if store in {*wanted, *OWN_URLS}
    ]


def _round_robin(metafunc: pytest.Metafunc, possible: Sequence[str]) -> tuple[list[str], list[str]]:
    """The first and another one, the same in every run whatever else there is; and this one again if it is broad.

    It is for every second test.
    """
    first, *others = [store for store in possible if store not in OWN_URLS]
    turn, place = divmod(zlib.crc32(metafunc.function.__name__.encode()), len(others))
    return [first, others[place]], [others[place]] if turn % 2 else []


def _label(store: str) -> str:
    """An address may hold a password."""
    parts = urlsplit(store)
    return f"{parts.scheme}-{parts.netloc.rpartition('@')[2]}" if parts.netloc else store


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All modules and tests stay to the end: the collector of garbage need not search them, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules whose tests are left out in any case are not imported, which takes longer than many tests.

    Paths that the command line names are collected all the same.
    """
    is_of_spark = _is_of_spark(collection_path)
    if config.getoption("--spark"):
        return None if is_of_spark or collection_path in SPARK_TESTS.parents else True
    return True if is_of_spark and _is_of_several(config) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _keep(_is_asked_for, config, items)
    if (only := config.getoption("--spark")) or _is_of_several(config):
        _keep(lambda item: _is_of_spark(item.path) == only, config, items)


def _keep(is_kept: Callable[[pytest.Item], bool], config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if not is_kept(item)]
    items[:] = [item for item in items if is_kept(item)]
    config.hook.pytest_deselected(items=others)


def _is_asked_for(item: pytest.Item) -> bool:
    is_broad, is_wider = item.get_closest_marker("broad") is not None, _has_examples(item)
    stores, broad = item.config.getoption("--stores"), item.config.getoption("--broad")
    if not stores and not broad:
        return not is_broad
    return (bool(stores) and _takes_a_store(item)) or (broad and (is_broad or is_wider))


def _has_examples(item: pytest.Item) -> bool:
    """A property, which has more examples in a run with ``--broad``."""
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


@cache  # each worker asks this of 10,000 tests, in some hundred files
def _is_of_spark(path: Path) -> bool:
    return path.is_relative_to(SPARK_TESTS)


def _is_of_several(config: pytest.Config) -> bool:
    """Whether the run was started with ``-n``."""
    return hasattr(config, "workerinput") or config.getoption("numprocesses", None) is not None


def _takes_a_store(item: pytest.Item) -> bool:
    """One of those that were asked for: a test for stores that processes share takes no memory store."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return any(parameters.get(name) in ALL_STORES for name in PARAMETERS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Garbage of other tests, as of a close that was interrupted, warns here and not where warnings are errors."""
    if any("error" in mark.args for mark in item.iter_markers("filterwarnings")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What cannot be had here, such as a server, in a line each."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.getreports("skipped"))
    for reason, tests in reasons.items():
        terminalreporter.write_line(f"{tests} {reason[:1].lower()}{reason[1:]}", yellow=True)


# ---------------------------------------------------------------------- what must not happen in silence


@pytest.fixture(autouse=True)
def nothing_unexpected_was_survived(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread or store of this process met an error that it does not know, unless the test is marked as such."""
    before = background_errors()
    yield
    if request.node.get_closest_marker("unexpected_errors") is None:
        assert {kind: count for kind, count in background_errors().items() if count != before.get(kind)} == {}


# ---------------------------------------------------------------------- the stores


@pytest.fixture
def sqlite_url(server_url: Callable[[str], str], tmp_path: Path) -> Iterator[str]:
    """The address of a file that is not there yet, in memory if there is room."""
    with _store_on("sqlite", server_url, tmp_path) as url:
        yield url


@pytest.fixture
def postgres_url(server_url: Callable[[str], str]) -> Iterator[str]:
    """An empty store on a server for all tests: none may stop it."""
    with fresh_store(server_url("postgresql")) as url:
        yield url


@pytest.fixture
def database_url(server_url: Callable[[str], str]) -> Iterator[str]:
    """An empty database on the same server, for a store and the tables of an application."""
    with fresh_database(server_url("postgresql")) as url:
        yield url


@pytest.fixture
def nats_url(server_url: Callable[[str], str]) -> Iterator[str]:
    """An empty store on a server for all tests: none may stop it."""
    with fresh_store(server_url("nats")) as url:
        yield url


@pytest.fixture
def nats_cluster_url(server_url: Callable[[str], str]) -> Iterator[str]:
    """An empty store on three nodes for all tests: none may stop one."""
    with fresh_store(server_url("nats-cluster")) as url:
        yield url


@pytest.fixture
def store_url(request: pytest.FixtureRequest, server_url: Callable[[str], str], tmp_path: Path) -> Iterator[str]:
    """The address of an empty store, on one backend after the other."""
    with _store_on(request.param, server_url, tmp_path) as url:
        yield url


@pytest.fixture
def shared_store_url(request: pytest.FixtureRequest, server_url: Callable[[str], str], tmp_path: Path) -> Iterator[str]:
    """The same, on backends that processes share."""
    with _store_on(request.param, server_url, tmp_path) as url:
        yield url


@contextmanager
def _store_on(backend: str, server_url: Callable[[str], str], tmp_path: Path) -> Iterator[str]:
    if backend == "memory":
        yield f"memory://{uuid.uuid4()}"
    elif backend == "sqlite":
        place = folder_in_memory(ROOM) or tmp_path
        with tempfile.TemporaryDirectory(prefix="readergroup-", dir=place, ignore_cleanup_errors=True) as folder:
            yield f"sqlite:///{folder}/store.db"
    else:
        with fresh_store(server_url(backend) if backend in SERVERS else backend) as url:
            yield url


@pytest.fixture(scope="session")
def server_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The address of the test run's server of this name."""
    folder = tmp_path_factory.getbasetemp()
    is_of_several = hasattr(request.config, "workerinput")  # each has a folder in that of the run
    servers = request.config.stash[SHARED_SERVERS] = SharedServers(folder.parent if is_of_several else folder)

    def url_of(name: str) -> str:
        try:
            return servers.url(name, SERVERS[name])
        except ServerUnavailable as reason:
            pytest.skip(f"no {name} server here: {reason}")

    return url_of


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        named = [Path(argument.partition("::")[0]).absolute() for argument in session.config.args]
        if session.config.getoption("--spark") or all(map(_is_of_spark, named)):
            session.exitstatus = pytest.ExitCode.OK  # they are in the other run: see `make test`
    # Not in the fixture's end, which belongs to a test: the process that started a server waits here for the others.
    if SHARED_SERVERS in session.config.stash:
        session.config.stash[SHARED_SERVERS].close()
