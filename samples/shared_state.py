"""The state synchronizer on its own: several threads sell from one stock, and never more than it holds."""

import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


class Stock(rg.State):
    items: rg.Map[str, int] = rg.Map()


class Sell(rg.Update[Stock], tag="sell"):
    item: str

    def apply_to(self, state: Stock, revision: rg.Revision) -> Stock:
        return state.replace(items=state.items.set(self.item, state.items[self.item] - 1))


class Deliver(rg.Update[Stock], tag="deliver"):
    item: str
    amount: int

    def apply_to(self, state: Stock, revision: rg.Revision) -> Stock:
        return state.replace(items=state.items.set(self.item, state.items.get(self.item, 0) + self.amount))


class Recount(rg.Update[Stock], tag="recount"):
    """Set the amount to that of a manual count."""

    item: str
    amount: int

    def apply_to(self, state: Stock, revision: rg.Revision) -> Stock:
        return state.replace(items=state.items.set(self.item, self.amount))


def sell_all(stock: rg.StateSynchronizer[Stock]) -> int:
    """Sell pears while there are any. Each decision is made on the state that its update is applied to."""

    def sell_one(state: Stock) -> tuple[Iterable[rg.Update[Stock]], bool]:
        return ([Sell(item="pear")], True) if state.items.get("pear", 0) > 0 else ([], False)

    sold = 0
    while stock.update_state_returning(sell_one):
        sold += 1
    return sold


def main(folder: Path) -> None:
    with rg.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        stock = client.synchronizer("shop/stock", initial=Stock(), updates=[Sell, Deliver, Recount])
        # One step: no thread can sell one of the missing pears.
        stock.update_state_unconditionally(Deliver(item="pear", amount=120), Recount(item="pear", amount=100))
        sold: list[int] = []
        sellers = [threading.Thread(target=lambda: sold.append(sell_all(stock))) for _ in range(4)]
        for seller in sellers:
            seller.start()
        for seller in sellers:
            seller.join()
        print(f"{sum(sold)} pears sold, {stock.state.items['pear']} left")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
