"""An audit writes down every change of a shared state, once and in order, even across a restart."""

import json
import sys
import threading
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


class Accounts(rg.State):
    balances: rg.Map[str, int] = rg.Map()


class Transfer(rg.Update[Accounts], tag="transfer"):
    payer: str
    payee: str
    amount: int

    def apply_to(self, state: Accounts, revision: rg.Revision) -> Accounts:
        balances = state.balances.set(self.payer, state.balances.get(self.payer, 0) - self.amount)
        return state.replace(balances=balances.set(self.payee, balances.get(self.payee, 0) + self.amount))


class Audit:
    """Appends a line for each update to a file, which also says where to continue."""

    def __init__(self, accounts: rg.StateSynchronizer[Accounts], path: Path) -> None:
        self._path = path
        self._grew = threading.Condition()
        lines = self.lines()
        after = rg.Revision.parse(lines[-1]["revision"]) if lines else None
        self.stop = accounts.on_update(self._write, after=after)

    def lines(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []

    def wait_for(self, lines: int) -> None:
        with self._grew:
            assert self._grew.wait_for(lambda: len(self.lines()) >= lines, timeout=10)

    def _write(self, applied: rg.AppliedUpdate[Accounts]) -> None:
        what = "a gap" if applied.gap else str(applied.update)
        with self._grew, open(self._path, "a") as file:
            file.write(json.dumps({"revision": str(applied.revision), "what": what}) + "\n")
            self._grew.notify_all()


def main(folder: Path) -> None:
    url, path = f"sqlite:///{folder / 'bank.db'}", folder / "audit.jsonl"
    with rg.connect(url) as client:
        accounts = client.synchronizer("bank/accounts", initial=Accounts(), updates=[Transfer])
        audit = Audit(accounts, path)
        accounts.update_state_unconditionally(Transfer(payer="alice", payee="bob", amount=5))
        audit.wait_for(1)
        audit.stop()

        # No audit is running. Two transfers in one step are two updates.
        accounts.update_state_unconditionally(
            Transfer(payer="bob", payee="carol", amount=2), Transfer(payer="bob", payee="dave", amount=1)
        )

        audit = Audit(accounts, path)
        accounts.update_state_unconditionally(Transfer(payer="dave", payee="alice", amount=1))
        audit.wait_for(4)
        for line in audit.lines():
            print(line["revision"], line["what"])
        print(f"{len(audit.lines())} transfers, each once; together {sum(accounts.state.balances.values())}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
