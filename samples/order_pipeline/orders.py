"""The orders and payments of a shop, the same in each run, and what is true of them."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

ORDERS, PAYMENTS, REVENUE, DEAD = "shop/orders", "shop/payments", "shop/revenue", "shop/dead"
COUNT = int(os.environ.get("ORDERS", 9_000))
SHOPS = ("Berlin", "Lyon", "Porto")
#: An order is up to 5 s older than one before it, a payment comes up to 20 s after its order.
JITTER, PAID_WITHIN = 5, 20
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Order(NamedTuple):
    event: bytes
    shop: str
    amount: int
    at: datetime
    is_damaged: bool
    payment: bytes | None  # written later


def orders() -> Iterator[Order]:
    """Twenty orders a second, in about the order of their times; one of a hundred is damaged, nine of ten are paid."""
    rng = random.Random(2026)
    for number in range(COUNT):
        at = BEGIN + timedelta(seconds=number / 20 - rng.uniform(0, JITTER))
        shop, amount = rng.choice(SHOPS), rng.randint(1, 100)
        event = json.dumps({"id": number, "shop": shop, "amount": amount, "at": at.isoformat()}).encode()
        is_damaged = rng.random() < 0.01
        paid_at = at + timedelta(seconds=rng.uniform(0, PAID_WITHIN))
        is_paid = rng.random() < 0.9 and not is_damaged
        payment = json.dumps({"id": number, "paid_at": paid_at.isoformat()}).encode() if is_paid else None
        yield Order(event[:-5] if is_damaged else event, shop, amount, at, is_damaged, payment)


class Truth(NamedTuple):
    revenue: dict[tuple[str, datetime], int]  # by shop and minute
    paid: int
    dead: int


def truth() -> Truth:
    revenue: Counter[tuple[str, datetime]] = Counter()
    paid = dead = 0
    for order in orders():
        paid += order.payment is not None
        dead += order.is_damaged
        if not order.is_damaged:
            revenue[order.shop, order.at.replace(second=0, microsecond=0)] += order.amount
    return Truth(dict(revenue), paid, dead)
