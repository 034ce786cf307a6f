"""A shop in three kinds of processes, as many of each as you like.

`place_orders` writes an order and an event about it in one transaction. `invoice_orders` reads these events, and writes
an invoice, its place in the stream, and an event about the invoice in one transaction. `relay_events` moves the events
from the database to the streams.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from sqlalchemy import Column, Connection, Double, Engine, Integer, MetaData, Table, Text, create_engine, insert, update

import readergroup as rg
from readergroup.sinks import SqlSink

ORDERS: Final = "shop/orders"
INVOICES: Final = "shop/invoices"
GROUP: Final = "invoicing"
CUSTOMERS: Final = ("ann", "bob", "cid", "dee", "eve", "fay")

tables = MetaData()
# Only the ids are unique: a second invoice of an order is to be seen, and not to be refused.
customers = Table(
    "customers",
    tables,
    Column("name", Text, primary_key=True),
    Column("orders", Integer, nullable=False),
    Column("owed", Integer, nullable=False),
)
orders = Table(
    "orders",
    tables,
    Column("id", Integer, primary_key=True),
    Column("customer", Text),
    Column("number", Integer),  # 1, 2, 3 and so on for each customer
    Column("amount", Integer),
    Column("at", Double),
)
invoices = Table(
    "invoices",
    tables,
    Column("id", Integer, primary_key=True),
    Column("customer", Text),
    Column("number", Integer),
    Column("owed", Integer),  # by the customer, after this order
    Column("at", Double),
)


class Shop(NamedTuple):
    """Where the shop keeps its data: the address of the streams, and that of the tables."""

    streams: str
    tables: str

    @contextmanager
    def open(self) -> Iterator[tuple[rg.Client, Engine, rg.Outbox[Any]]]:
        # Of SQLite: how long to wait while another process writes.
        options = {"timeout": 60} if self.tables.startswith("sqlite") else {}
        engine = create_engine(self.tables, connect_args=options)
        with rg.connect(self.streams) as client:
            yield client, engine, rg.Outbox(client, engine, serializer=rg.JsonSerializer())
        engine.dispose()


def prepare(shop: Shop) -> None:
    with shop.open() as (client, engine, outbox):
        client.streams.create(ORDERS, scaling=rg.ScalingPolicy.fixed(4))
        client.streams.create(INVOICES, scaling=rg.ScalingPolicy.fixed(4))
        client.groups.create(GROUP, streams=[ORDERS], reader_timeout_seconds=2)
        tables.create_all(engine)
        outbox.create_table()
        with engine.begin() as connection:
            connection.execute(insert(customers), [{"name": name, "orders": 0, "owed": 0} for name in CUSTOMERS])


class Cancelled(Exception):
    """The customer has changed his mind before the commit."""


def place_orders(shop: Shop) -> None:
    """Order something every few milliseconds, until SIGTERM."""
    rng, ending = random.Random(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    with shop.open() as (_, engine, outbox):
        while not ending.wait(rng.uniform(0.01, 0.05)):
            with suppress(Cancelled), engine.begin() as connection:
                place_order(connection, outbox, rng)


def place_order(connection: Connection, outbox: rg.Outbox[Any], rng: random.Random) -> None:
    customer, amount = rng.choice(CUSTOMERS), rng.randint(1, 100)
    counting = update(customers).where(customers.c.name == customer).values(orders=customers.c.orders + 1)
    number = connection.scalar(counting.returning(customers.c.orders))
    order = {"customer": customer, "number": number, "amount": amount}
    connection.execute(insert(orders).values(**order, at=time.time()))
    outbox.write(connection, ORDERS, order, routing_key=customer)
    if rng.random() < 0.1:
        raise Cancelled


def invoice_orders(shop: Shop) -> None:
    """Write an invoice for each order, until the stream of orders is sealed and read."""
    with shop.open() as (client, engine, outbox):

        def invoice(event: rg.Event[Any], connection: Connection) -> None:
            customer, number, amount = event.data["customer"], event.data["number"], event.data["amount"]
            charging = update(customers).where(customers.c.name == customer).values(owed=customers.c.owed + amount)
            owed = connection.scalar(charging.returning(customers.c.owed))
            due = {"customer": customer, "number": number, "owed": owed}
            connection.execute(insert(invoices).values(**due, at=time.time()))
            outbox.write(connection, INVOICES, due, routing_key=customer)

        client.groups.get(GROUP).pool(invoice, serializer=rg.JsonSerializer(), sink=SqlSink(engine)).run()


def relay_events(shop: Shop) -> None:
    """Move events to their streams, until the process ends."""
    with shop.open() as (_, _, outbox), outbox.relay(lease_seconds=2):
        signal.pause()
