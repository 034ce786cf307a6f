"""Write the orders and the payments, twenty times as fast as they happen, then seal both streams."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta

from orders import BEGIN, COUNT, ORDERS, PAYMENTS, REVENUE, orders, truth

import readergroup as rg

AT_ONCE = 100


def main(url: str) -> None:
    with rg.connect(url) as client, client.writer(ORDERS) as ordered, client.writer(PAYMENTS) as paid:
        began, payments = time.monotonic(), []
        for number, order in enumerate(orders(), 1):
            ordered.write(order.event, routing_key=order.shop)
            payments.append((order.shop, order.payment))
            if number % AT_ONCE == 0:
                ordered.flush()
                for shop, payment in payments:
                    if payment is not None:
                        paid.write(payment, routing_key=shop)
                paid.flush()
                payments.clear()
                time.sleep(max(0.0, began + number / 400 - time.monotonic()))
        # A later event closes the last windows. If the job is killed before it has written their sums, it waits for
        # another event: Spark runs no batch without data after a restart.
        late = (BEGIN + timedelta(seconds=COUNT)).isoformat()
        last_minute = max(minute for _, minute in truth().revenue)
        while not has_sum(client, last_minute):
            ordered.write(f'{{"id": -1, "shop": "closed", "amount": 0, "at": "{late}"}}'.encode())
            ordered.flush()
            time.sleep(1.0)
        client.streams.seal(ORDERS)
        client.streams.seal(PAYMENTS)


def has_sum(client: rg.Client, minute: datetime) -> bool:
    ranges = client.batch.segment_ranges(REVENUE)
    sums = (event.data for each in ranges for event in client.batch.read(each, serializer=rg.JsonSerializer()))
    return any(datetime.fromisoformat(found["minute"]).astimezone(UTC) == minute for found in sums)


if __name__ == "__main__":
    main(*sys.argv[1:])
