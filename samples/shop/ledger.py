"""The books of the shop: what was ordered, what was invoiced, and what other systems were told."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from sqlalchemy import select

import readergroup as rg

from .shop import INVOICES, Shop, invoices, orders


class Entry(NamedTuple):
    """The number of a customer's order, and what the customer owes after it."""

    number: int
    owed: int


class Book(NamedTuple):
    """The entries of each customer, in their order, and when they were made."""

    accounts: Mapping[str, Sequence[Entry]]
    times: Sequence[float]

    def __len__(self) -> int:
        return len(self.times)


class Ledger(NamedTuple):
    orders: Book
    invoices: Book
    #: Of the second stream.
    events: Book


def read(shop: Shop) -> Ledger:
    with shop.open() as (client, engine, _), engine.connect() as connection:
        ordered = connection.execute(select(orders).order_by(orders.c.number)).all()
        invoiced = connection.execute(select(invoices).order_by(invoices.c.id)).all()
        told = [
            event
            for part in client.batch.segment_ranges(INVOICES)
            for event in client.batch.read(part, serializer=rg.JsonSerializer())
        ]
    amounts = _by_customer((each.customer, Entry(each.number, each.amount)) for each in ordered)
    return Ledger(
        Book({name: _added_up(each) for name, each in amounts.items()}, sorted(each.at for each in ordered)),
        Book(
            _by_customer((each.customer, Entry(each.number, each.owed)) for each in invoiced),
            sorted(each.at for each in invoiced),
        ),
        Book(
            _by_customer((each.data["customer"], Entry(each.data["number"], each.data["owed"])) for each in told),
            sorted(each.written_at.timestamp() for each in told),
        ),
    )


def _by_customer(entries: Iterable[tuple[str, Entry]]) -> Mapping[str, Sequence[Entry]]:
    found = defaultdict(list)
    for customer, entry in entries:
        found[customer].append(entry)
    return found


def _added_up(amounts: Sequence[Entry]) -> Sequence[Entry]:
    sums = accumulate(amount for _, amount in amounts)
    return [Entry(each.number, owed) for each, owed in zip(amounts, sums, strict=True)]


def mistakes(ledger: Ledger) -> Sequence[str]:
    """Return what is wrong. Nothing is, if each order has one invoice and one event, in the order of the customer."""
    found = []
    for what, book in (("invoices", ledger.invoices), ("events", ledger.events)):
        for customer in sorted({*ledger.orders.accounts, *book.accounts}):
            expected, entries = ledger.orders.accounts.get(customer, []), book.accounts.get(customer, [])
            missing, extra = Counter(expected) - Counter(entries), Counter(entries) - Counter(expected)
            if expected != entries:
                found.append(
                    f"the {what} of {customer}: {missing.total()} missing, {extra.total()} too many"
                    if missing or extra
                    else f"the {what} of {customer} are in another order"
                )
    return found
