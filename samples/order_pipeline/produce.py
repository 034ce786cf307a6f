"""Write the orders and the payments, twenty times as fast as they happen, then seal both streams."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from orders import BEGIN, COUNT, ORDERS, PAYMENTS, orders

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
        # A later event closes the last windows: without it they stay open.
        late = (BEGIN + timedelta(seconds=COUNT)).isoformat()
        ordered.write(f'{{"id": -1, "shop": "closed", "amount": 0, "at": "{late}"}}'.encode())
        ordered.flush()
        client.streams.seal(ORDERS)
        client.streams.seal(PAYMENTS)


if __name__ == "__main__":
    main(*sys.argv[1:])
