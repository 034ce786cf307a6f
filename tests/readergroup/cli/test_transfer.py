"""``readergroup stream copy``, ``export`` and ``import``: what goes out comes back, and what is wrong is told."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgpack
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import readergroup as rg
from readergroup.cli.formats import Format, records, sink
from readergroup.streams.data.block import encode_block
from readergroup.streams.data.moments import microseconds_of
from tests.golden import golden
from tests.readergroup.cli.test_commands import PATIENCE_SECONDS, Cli, plain
from tests.waiting import until

SOURCE, TARGET = "shop/orders", "shop/archive"
FORMATS = pytest.mark.parametrize("chosen", ["jsonl", "msgpack", "parquet"])

Written = tuple[bytes, str | None, Mapping[str, bytes]]

EVENTS: list[Written] = [
    (b'{"id":1,"name":"\xc3\xa9"}', "a", {}),
    (b'{"id": 2}', "a", {"trace": b"\xff\x00"}),
    (b'{"id":3,"id":3}', "b", {}),
    (b"[1,2.50,1e400]", "b", {}),
    (b"[NaN]", "", {}),
    (b'["\\ud800"]', None, {"a": b"", "b": b"x"}),
    (b"plain text\n", "k\u00e9y", {}),
    (b"", "a", {}),
    (b"\xff\xfe\x00", "b", {}),
    (b"null", None, {}),
    (b"[" * 5000, "c", {}),
    (bytes(range(256)) * 300, "c", {}),
]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    made = Cli(tmp_path)
    made.ok("stream", "create", SOURCE, "--segments", "2")
    return made


@pytest.fixture
def client(cli: Cli) -> Iterator[rg.Client]:
    with rg.connect(cli.url) as client:
        yield client


def write(client: rg.Client, written: list[Written]) -> None:
    with client.writer(SOURCE) as writer:
        for data, key, headers in written:
            writer.write(data, routing_key=key, headers=headers or None, event_time=time_of(data))


def time_of(data: bytes) -> datetime | None:
    """Return the event time that `write` gives."""
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=len(data)) if len(data) % 2 else None


def read(client: rg.Client, stream: str) -> dict[str | None, list[tuple[object, ...]]]:
    """By routing key, in order; those without a key sorted."""
    found: dict[str | None, list[tuple[object, ...]]] = {}
    for each in client.batch.segment_ranges(stream):
        for event in client.batch.read(each):
            found.setdefault(event.routing_key, []).append(
                (event.raw, event.routing_key, dict(event.headers), event.event_time)
            )
    if None in found:
        found[None].sort(key=repr)
    return found


def scaled(client: rg.Client) -> None:
    write(client, EVENTS)
    client.streams.scale(SOURCE, split=[0])
    write(client, EVENTS)
    client.streams.scale(SOURCE, merge=[3, 1])
    write(client, EVENTS)


# ---------------------------------------------------------------------- out and back


@FORMATS
def test_what_is_exported_can_be_imported(cli: Cli, client: rg.Client, chosen: str) -> None:
    scaled(client)
    file = str(cli.folder / f"orders.{chosen}")
    count = 3 * len(EVENTS)
    assert f"{count} events exported" in cli.ok("stream", "export", SOURCE, file).replace(",", "")
    client.streams.create(TARGET, scaling=rg.ScalingPolicy.fixed(3))
    assert cli.json("stream", "import", TARGET, file) == {"stream": TARGET, "events": count}
    assert read(client, TARGET) == read(client, SOURCE)
    assert [name for name in os.listdir(cli.folder) if name.startswith(".")] == []


@FORMATS
def test_events_go_through_a_pipe(cli: Cli, client: rg.Client, chosen: str) -> None:
    scaled(client)
    client.streams.create(TARGET)
    command = [sys.executable, "-m", "readergroup.cli", "stream"]
    options = ["--format", chosen]
    with subprocess.Popen([*command, "export", SOURCE, *options], env=cli.environment, stdout=subprocess.PIPE) as out:
        done = subprocess.run(
            [*command, "import", TARGET, "-", *options],
            env=cli.environment,
            stdin=out.stdout,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert out.wait(PATIENCE_SECONDS) == 0
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{3 * len(EVENTS)} events imported" in done.stdout
    assert read(client, TARGET) == read(client, SOURCE)


@FORMATS
@pytest.mark.parametrize("has_times", [False, True], ids=["no event times", "event times"])
def test_an_export_is_written_and_read_as_in_the_first_release(chosen: str, has_times: bool) -> None:
    events = EVENTS[:-2]
    times = [time_of(data) if has_times else None for data, _, _ in events]
    keys, headers = [key for _, key, _ in events], [headers for _, _, headers in events]
    written_at, out = 1_700_000_000_123_456, io.BytesIO()
    with rg.connect("memory://") as client:
        client.streams.create(SOURCE)
        state = client.streams.fetch_state(SOURCE)
        block = encode_block(
            [data for data, _, _ in events],
            written_at=written_at,
            writer_id=bytes(16),
            first_number=0,
            keys=keys,
            headers=headers,
            event_times=[None if time is None else microseconds_of(time, "") for time in times],
        )
        client.store.append(state.data_segment(0), block)
        (segment,) = client.batch.segment_ranges(SOURCE)
        with sink(out, Format(chosen)) as opened:
            for batch in client.batch.batches(segment):
                opened.write(batch)
    stored = golden(f"export-v{2 if has_times else 1}.{chosen}", out.getvalue())
    if chosen == "parquet":  # its bytes depend on the version of pyarrow
        before, today = parquet.read_table(io.BytesIO(stored)), parquet.read_table(out)
        assert before.equals(today.select(before.column_names))
    else:
        assert stored == out.getvalue()
    with records(io.BytesIO(stored), Format(chosen)) as found:
        read_back = list(found)
    assert [(each.data, each.routing_key, each.headers or {}) for each in read_back] == events
    assert [each.event_time for each in read_back] == times


KEYS = st.none() | st.sampled_from(["a", "b"]) | st.text(max_size=5)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSONS = st.recursive(st.none() | st.booleans() | st.integers() | FINITE | st.text(), st.lists, max_leaves=5)
DATA = (
    st.binary(max_size=50)
    | JSONS.map(rg.JsonSerializer().dumps)
    | st.dictionaries(st.text(), JSONS).map(rg.JsonSerializer().dumps)
)
HEADERS = st.dictionaries(st.text(max_size=5), st.binary(max_size=5), max_size=3)


@FORMATS
@settings(max_examples=30)
@given(st.lists(st.tuples(DATA, KEYS, HEADERS), max_size=20))
def test_any_events_are_the_same_after_it(chosen: str, written: list[Written]) -> None:
    out = io.BytesIO()
    with rg.connect("memory://") as client:
        client.streams.create(SOURCE)
        write(client, written)
        with sink(out, Format(chosen)) as opened:
            for each in client.batch.segment_ranges(SOURCE):
                for batch in client.batch.batches(each, max_events=7):
                    opened.write(batch)
    out.seek(0)
    with records(out, Format(chosen)) as found:
        read_back = list(found)
    assert [(each.data, each.routing_key, each.headers or {}) for each in read_back] == written
    assert [each.event_time for each in read_back] == [time_of(each.data) for each in read_back]


def test_a_key_that_is_no_text_goes_by_json_and_msgpack_and_not_by_parquet(cli: Cli, client: rg.Client) -> None:
    write(client, [(b"x", "half a pair: \ud800", {})])
    for chosen in ("jsonl", "msgpack"):
        exported = cli("stream", "export", SOURCE, "--format", chosen).stdout_bytes
        client.streams.create(f"{TARGET}-{chosen}")
        cli.ok("stream", "import", f"{TARGET}-{chosen}", "--format", chosen, input=exported)
        assert read(client, f"{TARGET}-{chosen}") == read(client, SOURCE)
    assert "msgpack" in cli.fails(1, "stream", "export", SOURCE, str(cli.folder / "x.parquet"))
    assert not (cli.folder / "x.parquet").exists()


def test_json_lines_show_text_as_text_and_json_as_json(cli: Cli, client: rg.Client) -> None:
    write(
        client, [(b'{"id":1}', "a", {"trace": b"x"}), (b"text", "a", {}), (b"\xff", "a", {}), (b'{"id": 1}', "a", {})]
    )
    lines = [json.loads(line) for line in cli.ok("stream", "export", SOURCE).splitlines()]
    assert [line.pop("written_at")[:2] for line in lines] == ["20"] * 4
    assert lines == [
        {"data": {"id": 1}, "routing_key": "a", "headers_base64": {"trace": "eA=="}},
        {"data": "text", "routing_key": "a"},
        {"data_base64": "/w==", "routing_key": "a", "event_time": "2026-01-01T00:00:00.000001+00:00"},
        {"data": '{"id": 1}', "routing_key": "a", "event_time": "2026-01-01T00:00:00.000009+00:00"},
    ]


def test_json_of_any_depth_is_the_same_after_it(cli: Cli, client: rg.Client) -> None:
    deep = [b"[" * levels + b"]" * levels for levels in (100, 101, 500, *range(800, 1000), 5000)]
    write(client, [(data, "a", {}) for data in (*deep, b'{"a":[' + b"[]," * 200 + b"{}]}")])
    client.streams.create(TARGET)
    cli.ok("stream", "import", TARGET, input=cli.ok("stream", "export", SOURCE))
    assert read(client, TARGET) == read(client, SOURCE)


def test_lines_of_ones_own_and_those_that_read_prints_are_imported(cli: Cli, client: rg.Client) -> None:
    write(client, EVENTS[:2])
    printed = cli.ok("read", SOURCE, "--group", "g", "--json")
    client.streams.create(TARGET)
    own = '{"data": {"b": 1,  "a": "é"}, "routing_key": "k"}\n{"data": 7}\n{"data": "no end of line"}'
    cli.ok("stream", "import", TARGET, input=printed + own)
    assert read(client, TARGET) == {
        **read(client, SOURCE),
        "k": [('{"b":1,"a":"é"}'.encode(), "k", {}, None)],
        None: [(b"7", None, {}, None), (b"no end of line", None, {}, None)],
    }


def test_only_what_lies_between_the_cuts_is_exported(cli: Cli, client: rg.Client) -> None:
    write(client, EVENTS[:3])
    start = client.streams.info(SOURCE).tail.model_dump_json()
    write(client, EVENTS[3:5])
    end = client.streams.info(SOURCE).tail.model_dump_json()
    write(client, EVENTS[5:])
    assert len(cli.ok("stream", "export", SOURCE, "--start", start, "--end", end).splitlines()) == 2
    assert len(cli.ok("stream", "export", SOURCE, "--start", "head", "--end", start).splitlines()) == 3
    assert len(cli.ok("stream", "export", SOURCE, "--start", "-", input=end).splitlines()) == len(EVENTS) - 5
    assert "this is not a cut" in cli.fails(2, "stream", "export", SOURCE, "--end", "yesterday")


def test_the_name_of_the_file_says_its_format(cli: Cli, client: rg.Client) -> None:
    write(client, EVENTS)
    cli.ok("stream", "export", SOURCE, str(cli.folder / "a.msgpack"))
    with (cli.folder / "a.msgpack").open("rb") as file:
        assert len(list(msgpack.Unpacker(file, unicode_errors="surrogatepass"))) == len(EVENTS)
    assert "--format" in cli.fails(2, "stream", "export", SOURCE, str(cli.folder / "a.csv"))
    cli.ok("stream", "export", SOURCE, str(cli.folder / "a.csv"), "--format", "jsonl")
    assert len((cli.folder / "a.csv").read_bytes().splitlines()) == len(EVENTS)


def test_a_file_is_replaced_when_the_new_one_is_whole(cli: Cli, client: rg.Client) -> None:
    write(client, EVENTS[:2])
    file = cli.folder / "orders.jsonl"
    file.write_text("before")
    data = client.streams.fetch_state(SOURCE).data_segment(client.streams.fetch_state(SOURCE).routes.segment_of("a"))
    client.store.append(data, b"damaged")
    cli.fails(1, "stream", "export", SOURCE, str(file), "--yes")
    assert file.read_text() == "before"
    assert [name for name in os.listdir(cli.folder) if name.startswith(".")] == []


def test_an_export_names_the_file_that_it_cannot_write(cli: Cli, client: rg.Client) -> None:
    write(client, EVENTS[:2])
    file = cli.folder / "typo" / "orders.jsonl"
    assert cli.fails(1, "stream", "export", SOURCE, str(file)).endswith(f"No such file or directory: {file}\n")


def test_an_export_replaces_a_file_only_after_confirmation(cli: Cli, client: rg.Client) -> None:
    write(client, EVENTS[:2])
    file = cli.folder / "orders.jsonl"
    file.write_text("before")
    assert "add --yes" in cli.fails(2, "stream", "export", SOURCE, str(file))
    code, shown = cli.on_terminal("stream", "export", SOURCE, str(file), input=b"n\n")
    assert code == 1 and "Replace the file" in shown
    assert file.read_text() == "before"
    cli.ok("stream", "export", SOURCE, str(file), "--yes")
    assert len(file.read_text().splitlines()) == 2


def test_an_interrupted_import_says_where_to_continue(cli: Cli, client: rg.Client) -> None:
    client.streams.create(TARGET)
    lines = [f'{{"data": "event {number}"}}\n' for number in range(3000)]
    with cli.process("stream", "import", TARGET, "--skip", "10", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.writelines(lines)
        process.stdin.flush()
        until(lambda: client.streams.info(TARGET).tail.offsets[f"{TARGET}/0"] > 0)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    stored = int(re.findall("interrupted; ([0-9,]+) events? stored", said)[0].replace(",", ""))
    assert f"--skip {stored + 10}\n" in said
    events = [event.raw for each in client.batch.segment_ranges(TARGET) for event in client.batch.read(each)]
    assert events == [f"event {number}".encode() for number in range(10, 10 + stored)]


def test_a_format_for_programs_is_not_shown_on_a_terminal(cli: Cli) -> None:
    code, shown = cli.on_terminal("stream", "export", SOURCE, "--format", "msgpack")
    assert code == 2 and "name a file" in shown


def test_parquet_without_pyarrow_says_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "readergroup.cli.parquet", raising=False)
    monkeypatch.delattr("readergroup.cli.parquet", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install '.[arrow]'" in cli.fails(1, "stream", "export", SOURCE, str(cli.folder / "x.parquet"))


def test_parquet_has_the_columns_that_spark_reads(cli: Cli, client: rg.Client) -> None:
    import pyarrow.parquet

    write(client, EVENTS)
    cli.ok("stream", "export", SOURCE, str(cli.folder / "orders.parquet"))
    table = pyarrow.parquet.read_table(cli.folder / "orders.parquet")
    assert table.column_names == ["event", "routing_key", "headers", "written_at", "event_time"]
    assert sorted(table["event"].to_pylist()) == sorted(data for data, _, _ in EVENTS)
    assert str(table.schema.field("written_at").type) == "timestamp[us, tz=UTC]"


# ---------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no json", "not JSON"),
        ("", "not JSON"),
        ("7", "JSON object"),
        ("{}", "either data or data_base64"),
        ('{"data": 1, "data_base64": ""}', "either data or data_base64"),
        ('{"data": null}', "null"),
        ('{"data_base64": "?"}', "base64"),
        ('{"data_base64": 7}', "base64"),
        ('{"data": "x", "routing_key": 7}', "routing_key"),
        ('{"data": "x", "headers_base64": [7]}', "headers_base64"),
        ('{"data": "x", "headers_base64": {"a": "?"}}', "header"),
        ('{"data": "x", "key": "a"}', "'key'"),
        ('{"data": "x", "event_time": 7}', "event_time must be a time with a timezone"),
        ('{"data": "x", "event_time": "2026-01-01"}', "event_time must be a time with a timezone"),
        ('{"data": "x", "event_time": "0001-01-01T00:00:00+05:00"}', "event_time must be a time with a timezone"),
        ('{"data": "\\ud800"}', "surrogates"),
        ('{"data": "x", "routing_key": "' + "k" * 5000 + '"}', "routing key"),
        ('{"data": "' + "x" * (9 << 20) + '"}', "too large"),
    ],
)
def test_a_wrong_line_is_told_with_its_number_and_what_comes_before_it_is_written(
    cli: Cli, client: rg.Client, line: str, reason: str
) -> None:
    good = '{"data": "good", "routing_key": "a"}\n'
    told = cli.fails(1, "stream", "import", SOURCE, input=good * 3 + line + "\n" + good)
    assert "line 4: " in told and reason in told and "the 3 events before it are written" in told
    assert read(client, SOURCE) == {"a": [(b"good", "a", {}, None)] * 3}
    # Corrected, it goes on where it was.
    cli.ok("stream", "import", SOURCE, "--skip", "3", input=good * 3 + good.replace("good", "corrected") + good)
    assert [data for data, *_ in read(client, SOURCE)["a"]] == [b"good"] * 3 + [b"corrected", b"good"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"\xc1", "not msgpack"),
        (msgpack.packb(7), "a map"),
        (msgpack.packb({"data": "text"}), "a map with the bytes"),
        (msgpack.packb({"data": b"", "key": "a"}), "'key'"),
        (msgpack.packb({"data": b"", "routing_key": 7}), "routing_key"),
        (msgpack.packb({"data": b"", "headers": {"a": "text"}}), "headers"),
        (msgpack.packb({"data": b"", "headers": 7}), "headers"),
        (msgpack.packb({"data": b"", "event_time": 2**62}), "event_time"),
        (msgpack.packb({"data": b"", "event_time": True}), "event_time"),
        (msgpack.packb({"data": b"cut off"})[:-1], "ends inside"),
    ],
)
def test_a_wrong_record_is_told_with_its_number(cli: Cli, client: rg.Client, record: bytes, reason: str) -> None:
    good = msgpack.packb({"data": b"good", "routing_key": "a"})
    told = cli.fails(1, "stream", "import", SOURCE, "--format", "msgpack", input=good * 2 + record)
    assert "record 3: " in told and reason in told and "the 2 events before it are written" in told
    assert read(client, SOURCE) == {"a": [(b"good", "a", {}, None)] * 2}


def test_a_wrong_parquet_file_is_refused(cli: Cli, client: rg.Client) -> None:
    import pyarrow
    import pyarrow.parquet

    file = cli.folder / "x.parquet"
    for columns, reason in (
        ({"other": pyarrow.array([1])}, "no column 'event'"),
        ({"event": pyarrow.array(["text"])}, "'event' is string"),
        ({"event": pyarrow.array([b"x"]), "routing_key": pyarrow.array([1])}, "'routing_key' is int64"),
    ):
        pyarrow.parquet.write_table(pyarrow.table(columns), file)
        assert reason in cli.fails(1, "stream", "import", SOURCE, str(file))
    pyarrow.parquet.write_table(pyarrow.table({"event": pyarrow.array([b"x", None], pyarrow.binary())}), file)
    assert "row 2: the event is null; the 1 event before it" in cli.fails(1, "stream", "import", SOURCE, str(file))
    file.write_bytes(file.read_bytes()[:-3])
    assert "not a complete Parquet file" in cli.fails(1, "stream", "import", SOURCE, str(file))
    assert read(client, SOURCE) == {None: [(b"x", None, {}, None)]}


def test_what_cannot_be_written_any_more_is_told(cli: Cli, client: rg.Client) -> None:
    assert "0 events, fewer than --skip 5" in cli.fails(1, "stream", "import", SOURCE, "--skip", "5", input="")
    client.streams.seal(SOURCE)
    assert "sealed" in cli.fails(1, "stream", "import", SOURCE, input='{"data": "x"}\n')
    assert "no stream of this name" in cli.fails(1, "stream", "import", TARGET, input='{"data": "x"}\n')
    assert "no stream of this name" in cli.fails(1, "stream", "export", TARGET)
    assert "No such file" in cli.fails(1, "stream", "import", SOURCE, str(cli.folder / "none"))


# ---------------------------------------------------------------------- copy


def test_a_stream_is_copied(cli: Cli, client: rg.Client) -> None:
    scaled(client)
    assert cli.ok("stream", "copy", SOURCE, TARGET) == f"{TARGET}: 2 segments (2, 4), epoch 2, sealed\n"
    assert read(client, TARGET) == read(client, SOURCE)
    by_events = cli.json("stream", "copy", SOURCE, f"{TARGET}-2", "--by", "events")
    assert isinstance(by_events, dict) and by_events["sealed"]
    assert read(client, f"{TARGET}-2") == read(client, SOURCE)
    end = client.streams.info(SOURCE).head.model_dump_json()
    cli.ok("stream", "copy", SOURCE, f"{TARGET}-3", "--end", end, "--by", "segments")
    assert read(client, f"{TARGET}-3") == {}
    assert "onto itself" in cli.fails(2, "stream", "copy", SOURCE, SOURCE)
    assert "exists" in cli.fails(1, "stream", "copy", TARGET, f"{TARGET}-2")
    assert "--by" in cli.fails(2, "stream", "copy", SOURCE, "shop/x", "--by", "turns")
    assert "this is not a cut" in cli.fails(2, "stream", "copy", SOURCE, "shop/x", "--start", "yesterday")


def test_a_copy_that_was_cut_off_goes_on_or_is_given_up(cli: Cli, client: rg.Client) -> None:
    scaled(client)
    client.streams.copies.begin(SOURCE, TARGET)
    assert "unfinished copy" in cli.fails(1, "stream", "info", TARGET)
    assert TARGET not in cli.ok("stream", "list")
    cli.ok("stream", "delete", TARGET, "--yes")
    client.streams.copies.begin(SOURCE, TARGET)
    cli.ok("stream", "copy", SOURCE, TARGET)
    assert read(client, TARGET) == read(client, SOURCE)


def test_on_a_terminal_progress_is_shown_at_80_columns(cli: Cli, client: rg.Client) -> None:
    with client.writer(SOURCE) as writer:
        for number in range(1000):
            writer.write(b"x" * 1000, routing_key=str(number))
    file = cli.folder / "orders.jsonl"
    for command, title in (
        (("copy", SOURCE, TARGET, "--by", "events"), f"copying {SOURCE}"),
        (("export", SOURCE, str(file)), f"exporting {SOURCE}"),
        (("import", SOURCE, str(file)), f"importing to {SOURCE}"),
    ):
        code, shown = cli.on_terminal("stream", *command)
        assert code == 0
        lines = [line for part in shown.split("\r") for line in plain(part)]
        assert any(title in line for line in lines), shown
        assert all(len(line) <= 80 for line in lines), shown
    assert "2 segments" in cli.ok("stream", "copy", SOURCE, f"{TARGET}-2", "--by", "events")


def test_a_copy_that_is_interrupted_goes_on(cli: Cli, client: rg.Client) -> None:
    with client.writer(SOURCE) as writer:
        for number in range(5_000):
            writer.write(bytes(3000), routing_key=str(number))
    for number in range(5):
        target = f"{TARGET}-{number}"
        # Where the tests run in the background, a shell has them ignore this signal.
        process = cli.process(
            *("stream", "copy", SOURCE, target, "--by", "events"),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while not list(client.store.list(f"data/{target}/")):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=PATIENCE_SECONDS)
        if not client.streams.exists(target):
            break  # else it was quicker than the signal
    assert (process.returncode, told) == (130, "")
    cli.ok("stream", "copy", SOURCE, target)
    assert client.streams.info(target).sealed
