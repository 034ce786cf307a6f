"""A sink on a Django connection, in a process of its own, because Django is set up once in each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

SETUP: Final = """
import logging, sys
from contextlib import suppress
import django
from django.conf import settings

options = {"timeout": 60, "init_command": "PRAGMA synchronous=OFF"}
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1], "OPTIONS": options}
settings.configure(DATABASES={"default": database})
django.setup()
from django.db import connection, models, transaction
import readergroup as rg
from readergroup.sinks import SqlSink

class Order(models.Model):
    body = models.TextField()
    class Meta:
        app_label = "shop"

with connection.schema_editor() as editor:
    editor.create_model(Order)
client = rg.connect("memory://")
client.streams.create("shop/orders")
with client.writer("shop/orders") as writer:
    for number in range(20):
        writer.write(b"%d" % number, routing_key="ann")
client.streams.seal("shop/orders")
sink = SqlSink("default")
attempts = {}

def begin(name):
    print(name)
    attempts.clear()
    Order.objects.all().delete()
    return client.groups.create(name, streams=["shop/orders"])

def first(event):
    attempts[event.offset] = attempts.get(event.offset, 0) + 1
    return attempts[event.offset] == 1

def bodies():
    return [int(order.body) for order in Order.objects.order_by("id")]
"""

PROGRAMS: Final = {
    "a-pool": """
def handle(event, connection):
    Order.objects.create(body=event.raw.decode())
    if first(event) and event.raw.endswith(b"7"):
        raise ZeroDivisionError
group.pool(handle, sink=sink, retry=rg.RetryPolicy(attempts=2, first_delay_seconds=0.001)).run()
assert bodies() == list(range(20)), bodies()
assert sum(attempts.values()) == 22
sink.reset(group, "head")
Order.objects.all().delete()
group.pool(lambda event, connection: Order.objects.create(body=event.raw.decode()) and None, sink=sink).run()
assert bodies() == list(range(20)), bodies()
""",
    "many-at-once": """
def handle(event, connection):
    Order.objects.create(body=event.raw.decode())
group.pool(handle, sink=sink, concurrency=4).run()
assert bodies() == list(range(20)), bodies()
""",
    "a-swallowed-error": """
def handle(event, connection):
    Order.objects.create(body=event.raw.decode())
    if first(event):
        with suppress(Exception), transaction.atomic(savepoint=False):
            raise ZeroDivisionError
group.pool(handle, sink=sink, retry=rg.RetryPolicy(attempts=2, first_delay_seconds=0.001)).run()
assert bodies() == list(range(20)), bodies()
""",
    "a-commit": """
def handle(event, connection):
    Order.objects.create(body=event.raw.decode())
    transaction.commit()
try:
    group.pool(handle, sink=sink).run()
except rg.HandlerError as error:
    assert "TransactionManagementError" in str(error), error
else:
    raise AssertionError("it was not noticed")
assert bodies() == [], bodies()
""",
    "by-hand": """
with group.reader(sink=sink) as reader:
    for event in reader:
        for _ in range(2):
            with suppress(rg.EventStoredError), sink.transaction(event):
                Order.objects.create(body=event.raw.decode())
assert bodies() == list(range(20)), bodies()
""",
    "inside-an-atomic-block": """
with transaction.atomic(), group.reader(sink=sink) as reader:
    try:
        reader.read(timeout=5)
    except rg.InvalidArgumentError as error:
        assert "open transaction" in str(error), error
    else:
        raise AssertionError("it was not noticed")
""",
    "an-unknown-alias": """
try:
    SqlSink("orders")
except rg.InvalidArgumentError as error:
    assert "no connection of this alias" in str(error), error
else:
    raise AssertionError("it was not noticed")
""",
}


def test_django(tmp_path: Path) -> None:
    pytest.importorskip("django")
    each = [f"group = begin({name!r})\n{program}" for name, program in PROGRAMS.items()]
    run = [sys.executable, "-c", "\n".join([SETUP, *each]), str(tmp_path / "django.db")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"in {done.stdout.split(chr(10))[-2:]}: {done.stderr}"
