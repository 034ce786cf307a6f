"""What docs/operations.md says of rights, backups and restores, tried on real servers with what it prints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

import readergroup as rg
from synchronizer import AttributeChange, NotFoundError, SegmentStore, StoreUnavailableError, open_store
from synchronizer.stores.nats import address as nats_address
from synchronizer.stores.postgres import connections as postgres_connections
from synchronizer.stores.postgres import schema as postgres_schema
from tests.places import DOCS, ROOT
from tests.servers.nats import NatsCluster, NatsServer
from tests.servers.postgres import PostgresServer
from tests.servers.unavailable import ServerUnavailable
from tests.waiting import PATIENCE_SECONDS

PAGE = (DOCS / "operations.md").read_text()
STREAM = "shop/orders"
GROUP = "billing"
KEYS = 5
PICTURE = os.urandom(1_500_000)
LONG = PATIENCE_SECONDS


def printed(name: str) -> str:
    """The block of the page that stands under the comment ``run: name``."""
    found = re.search(rf"^<!-- run: {re.escape(name)} -->\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"the page prints nothing under {name!r}"
    return found[1]


def run_as_printed(name: str, folder: Path, programs: Path | None = None, **environment: str) -> None:
    """Run a shell block of the page in ``folder``, beside the tools of the repository."""
    if not (folder / "deploy").exists():
        (folder / "deploy").symlink_to(ROOT / "deploy")
    path = os.pathsep.join(filter(None, [str(programs or ""), str(Path(sys.executable).parent), os.environ["PATH"]]))
    done = subprocess.run(
        ["bash", "-eu", "-c", printed(name)],
        cwd=folder,
        env={**os.environ, **environment, "PATH": path},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------- a server is lost, its backup restored


def test_a_lost_postgresql_server_is_restored_and_readers_go_on_from_their_commits(tmp_path: Path) -> None:
    with _servers() as servers:
        first = servers.enter_context(PostgresServer())

        def back_up() -> None:
            run_as_printed("back up PostgreSQL", tmp_path, first.binaries, DATABASE_URL=first.url)

        def lose_and_restore() -> None:
            first.kill()
            second = PostgresServer()
            second.port = first.port
            servers.enter_context(second)
            run_as_printed("restore PostgreSQL", tmp_path, second.binaries, DATABASE_URL=second.url)

        _lose_and_restore(first.url, back_up, lose_and_restore)


@pytest.mark.parametrize("kind", [NatsServer, NatsCluster])
def test_lost_nats_servers_are_restored_and_readers_go_on_from_their_commits(
    kind: type[NatsServer] | type[NatsCluster], tmp_path: Path
) -> None:
    with _servers() as servers:
        first = servers.enter_context(kind(options={"durable": "always"}))
        addresses = ",".join(f"nats://{node.address}" for node in _nodes(first))

        def back_up() -> None:
            run_as_printed("back up NATS", tmp_path, NATS_SERVERS=addresses)

        def lose_and_restore() -> None:
            first.kill()
            second = kind()
            for old, new in zip(_nodes(first), _nodes(second), strict=True):
                new.port = old.port
            servers.enter_context(second)
            run_as_printed("restore NATS", tmp_path, NATS_SERVERS=addresses)

        _lose_and_restore(first.url, back_up, lose_and_restore)


@contextmanager
def _servers() -> Iterator[ExitStack]:
    """Ends the servers that are entered; where one cannot be had the test is skipped."""
    with ExitStack() as servers:
        try:
            yield servers
        except ServerUnavailable as reason:
            pytest.skip(f"no such server here: {reason}")


@pytest.mark.parametrize("verb", ["backup", "restore"])
def test_the_backup_of_nats_gives_up_where_no_server_answers(verb: str, tmp_path: Path) -> None:
    done = _nats_backup(verb, "nats://shop:secret@127.0.0.1:1", tmp_path / "backup")
    assert done.returncode == 1 and "no server answers; check the address: " in done.stderr
    assert "secret" not in done.stderr and done.stderr.count("\n") == 1


def test_a_backup_of_nats_without_its_right_names_the_right(tmp_path: Path) -> None:
    program = (ROOT / "deploy" / "nats_backup.py").read_text()
    (tmp_path / "nats_backup.py").write_text(program.replace("_SECONDS = 30.0", "_SECONDS = 5.0"))
    users = 'authorization { users: [{ user: shop, password: secret, permissions: { publish: ["readergroup.>"] } }] }'
    with _servers() as servers:
        server = servers.enter_context(NatsServer(settings=[users], credentials="shop:secret"))
        done = _nats_backup("backup", server.url, tmp_path / "backup", tmp_path / "nats_backup.py")
    assert done.returncode == 1 and "$js.api.stream.snapshot.readergroup" in done.stderr.lower()


def _nats_backup(
    verb: str, servers: str, folder: Path, program: Path = ROOT / "deploy" / "nats_backup.py"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program), verb, servers, "readergroup", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG)


def _nodes(server: NatsServer | NatsCluster) -> list[NatsServer]:
    return server.nodes if isinstance(server, NatsCluster) else [server]


def _lose_and_restore(url: str, back_up: Callable[[], None], lose_and_restore: Callable[[], None]) -> None:
    with _abandoned(rg.connect(url, timeout=LONG)) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        group = client.groups.create(GROUP, streams=[STREAM], reader_timeout_seconds=60.0)
        _write(client, range(300))
        reader = group.reader("before", serializer=rg.JsonSerializer(), auto_commit=False)
        read_before = [_next(reader) for _ in range(100)]
        reader.commit()
        client.streams.create("shop/pictures")
        with client.writer("shop/pictures") as writer:
            writer.write(PICTURE)  # a server sends a larger snapshot in parts
        back_up()

        # What comes now is in no backup, and is lost.
        _write(client, range(300, 400))
        for _ in range(50):
            _next(reader)
        reader.commit()
        group.reader("another").close()
        lose_and_restore()
        with pytest.raises(rg.CorruptStateError, match="lost acknowledged data"):
            group.online_readers()
        with pytest.raises((rg.CorruptStateError, rg.ReaderNotInGroupError)):
            reader.commit()

    with rg.connect(url, timeout=LONG) as client:
        _write(client, range(400, 500))
        client.streams.seal(STREAM)
        (range_of_pictures,) = client.batch.segment_ranges("shop/pictures")
        assert [event.data for event in client.batch.read(range_of_pictures)] == [PICTURE]
        group = client.groups.get(GROUP)
        group.configure(reader_timeout_seconds=1.0)  # the reader of before the loss is dead, and no other may be
        with group.reader("after", serializer=rg.JsonSerializer()) as reader:
            read_after = [event.data for event in reader]
    assert sorted(read_before + read_after) == [*range(300), *range(400, 500)]
    for key in range(KEYS):
        of_key = [number for number in read_after if number % KEYS == key]
        assert of_key == sorted(of_key)


@contextmanager
def _abandoned(client: rg.Client) -> Iterator[rg.Client]:
    """The client of a process that ends badly."""
    try:
        yield client
    finally:
        with suppress(rg.ReaderGroupError):
            client.close()


def _write(client: rg.Client, numbers: range) -> None:
    with client.writer(STREAM, serializer=rg.JsonSerializer()) as writer:
        for number in numbers:
            writer.write(number, routing_key=str(number % KEYS))


def _next(reader: rg.Reader[int]) -> int:
    event = reader.read(timeout=LONG)
    assert event is not None
    return event.data


def test_a_sqlite_file_is_backed_up_while_it_is_written(tmp_path: Path) -> None:
    with rg.connect(f"sqlite:///{tmp_path}/shop.db") as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(1))
        client.groups.create(GROUP, streams=[STREAM])
        is_enough = threading.Event()
        is_begun = threading.Event()

        def write() -> None:
            with client.writer(STREAM, serializer=rg.JsonSerializer()) as writer:
                number = 0
                while not is_enough.is_set():
                    writer.write(number)
                    number += 1
                    if number % 100 == 0:
                        writer.flush()
                        is_begun.set()

        thread = threading.Thread(target=write)
        thread.start()
        try:
            assert is_begun.wait(LONG)
            run_as_printed("back up SQLite", tmp_path)
        finally:
            is_enough.set()
            thread.join()
    with rg.connect(f"sqlite:///{tmp_path}/backup.db") as client:
        client.streams.seal(STREAM)
        with client.groups.get(GROUP).reader(serializer=rg.JsonSerializer()) as reader:
            numbers = [event.data for event in reader]
    assert len(numbers) >= 100
    assert numbers == [*range(len(numbers))]


def test_a_copy_of_a_sqlite_file_in_use_lacks_commits_without_notice(tmp_path: Path) -> None:
    with rg.connect(f"sqlite:///{tmp_path}/shop.db") as client:
        client.streams.create(STREAM)
        shutil.copy(tmp_path / "shop.db", tmp_path / "copy.db")
        with rg.connect(f"sqlite:///{tmp_path}/copy.db", must_exist=True) as copied:
            assert not copied.streams.exists(STREAM)
        assert client.streams.exists(STREAM)


# ---------------------------------------------------------------------- addresses


def test_the_program_of_the_readme_runs_on_postgresql(postgres_url: str, tmp_path: Path) -> None:
    _run_readme_on(postgres_url, tmp_path)


def test_the_program_of_the_readme_runs_on_nats(nats_url: str, tmp_path: Path) -> None:
    _run_readme_on(nats_url, tmp_path)


def _run_readme_on(url: str, folder: Path) -> None:
    found = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found and found[1].count("sqlite:///shop.db") == 1
    program = found[1].replace("sqlite:///shop.db", url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "1000 orders" in done.stdout


@pytest.mark.parametrize(
    ("section", "options"),
    [("PostgreSQL", postgres_connections._OWN_OPTIONS), ("NATS JetStream", nats_address._OPTIONS)],
)
def test_the_page_lists_all_options_of_an_address(section: str, options: Sequence[str]) -> None:
    table = PAGE.partition(f"### {section}\n")[2].partition("\n#")[0]
    listed = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert {name for cell in listed for name in re.findall(r"`(\w+)`", cell)} == {*options}


def test_the_page_names_the_format_of_the_schema() -> None:
    assert f"this release knows {postgres_schema.FORMAT}." in PAGE


def test_the_addresses_of_the_readme_are_understood() -> None:
    postgresql, nats = re.findall(r'rg\.connect\("((?:postgresql|nats)://.*)"\)', (ROOT / "README.md").read_text())
    assert postgres_connections.parse_address(postgresql).url == postgresql
    assert nats_address.parse_address(nats).url == nats


# ---------------------------------------------------------------------- rights


@pytest.fixture(scope="module")
def server_with_roles() -> Iterator[PostgresServer]:
    """The page's two roles, and a store that the first has made."""
    with _servers() as servers:
        server = servers.enter_context(PostgresServer())
        with psycopg.connect(server.url, autocommit=True) as administrator:
            administrator.execute("CREATE ROLE stranger LOGIN")
            administrator.execute("CREATE DATABASE shop")
        with psycopg.connect(server.url_of("shop"), autocommit=True) as administrator:
            administrator.execute(printed("the owner"))
            with open_store(server.url_of("shop", user="shop")) as store:
                _use(store)
            administrator.execute(printed("the worker"))
        yield server


def test_a_role_without_rights_is_told_where_they_are_listed(server_with_roles: PostgresServer) -> None:
    with pytest.raises(StoreUnavailableError, match=r"docs/operations\.md.*42501"):
        open_store(server_with_roles.url_of("shop", user="stranger"))


def test_the_worker_uses_all_of_the_store_and_changes_nothing_of_what_it_is_made_of(
    server_with_roles: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = server_with_roles.url_of("shop", user="shop_worker")
    with rg.connect(url) as client:
        client.streams.create(STREAM)
        group = client.groups.create(GROUP, streams=[STREAM])
        _write(client, range(20))
        with group.reader("reader-1", serializer=rg.JsonSerializer()) as reader:
            assert [_next(reader) for _ in range(20)]
        client.groups.delete(GROUP)
        client.streams.seal(STREAM)
        client.streams.delete(STREAM)
    with open_store(url) as store:
        _use(store)
    assert "42501" not in caplog.text
    with psycopg.connect(url) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("DROP TABLE readergroup.chunk")


def test_none_of_the_rights_of_the_worker_can_be_left_out(
    server_with_roles: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    worker = server_with_roles.url_of("shop", user="shop_worker")
    with psycopg.connect(server_with_roles.url_of("shop"), autocommit=True) as administrator:
        rights = administrator.execute(
            "SELECT privilege_type, 'TABLE readergroup.' || table_name FROM information_schema.role_table_grants"
            " WHERE grantee = 'shop_worker'"
        ).fetchall()
        for right, thing in [*rights, ("USAGE", "SCHEMA readergroup")]:
            administrator.execute(f"REVOKE {right} ON {thing} FROM shop_worker")
            caplog.clear()
            try:
                with suppress(StoreUnavailableError), open_store(worker) as store:
                    _use(store)
                    assert "42501" in caplog.text, f"{right} on {thing} is not needed"
            finally:
                administrator.execute(f"GRANT {right} ON {thing} TO shop_worker")
    assert len(rights) == 13


def _use(store: SegmentStore) -> None:
    """Every verb once."""
    name = f"segment-{os.urandom(8).hex()}"
    store.create(name)
    store.append(name, b"abc", attributes={"a": AttributeChange(None, b"1"), "b": AttributeChange(None, b"1")})
    store.append(name, b"", attributes={"a": AttributeChange(b"1", b"2"), "b": AttributeChange(b"1", None)})
    store.append(name, b"def", expected_offset=3)
    assert store.read(name, 0, 10)
    assert store.attributes(name) == {"a": b"2"}
    assert store.wait({name: 0}, 1.0)
    if store.guarantees.fair_lock:
        with store.fair_lock(name, 1.0) as is_held:
            assert is_held
    store.truncate(name, 4)
    store.seal(name)
    assert name in store.list("segment-")
    store.delete(name)
    with pytest.raises(NotFoundError):
        store.info(name)
    store.forget(name)


def test_the_printed_looks_at_postgresql_show_the_store(server_with_roles: PostgresServer) -> None:
    with open_store(server_with_roles.url_of("shop", user="shop_worker")):
        with psycopg.connect(server_with_roles.url_of("shop"), autocommit=True) as administrator:
            answers = [administrator.execute(each).fetchall() for each in printed("look at PostgreSQL").split(";")[:-1]]
    connections, tables, open_for_long = answers
    assert connections
    assert {name for name, *_ in tables} == {"store", "segment", "chunk", "attribute"}
    assert open_for_long == []


def test_the_printed_permissions_of_nats_suffice() -> None:
    with _servers() as servers:
        server = servers.enter_context(NatsServer(settings=[printed("the NATS user")], credentials="shop:secret"))
        with rg.connect(server.url) as client:
            client.streams.create(STREAM)
            group = client.groups.create(GROUP, streams=[STREAM])
            _write(client, range(20))
            with group.reader("reader-1", serializer=rg.JsonSerializer()) as reader:
                assert [_next(reader) for _ in range(20)]
            client.groups.delete(GROUP)
            client.streams.seal(STREAM)
            client.streams.delete(STREAM)
        with open_store(server.url) as store, open_store(server.url) as other:
            _use(store)
            if store.guarantees.fair_lock:
                _contend(store, other)
        assert "Violation" not in server.log()


def _contend(store: SegmentStore, other: SegmentStore) -> None:
    is_waiting = threading.Event()

    def wait_for_it() -> None:
        is_waiting.set()
        with other.fair_lock("name", LONG) as is_held:
            assert is_held

    with store.fair_lock("name", LONG) as is_held:
        assert is_held
        thread = threading.Thread(target=wait_for_it)
        thread.start()
        is_waiting.wait(LONG)
        with store.fair_lock("name", 0.2) as is_held_twice:
            assert not is_held_twice
    thread.join(LONG)
    assert not thread.is_alive()
