"""Serves the lag and the desired number of readers of a group over HTTP, for KEDA or another scaler of your readers.

    python metrics_for_keda.py                       # a demonstration on a SQLite file
    READERGROUP_URL=... python metrics_for_keda.py --group billing --max-readers 20 --port 8080

One such process is enough; a second one does no harm.
"""

import argparse
import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import mkdtemp
from urllib.request import urlopen

import readergroup as rg


def server(group: rg.ReaderGroup, policy: rg.ReaderScalingPolicy, port: int) -> ThreadingHTTPServer:
    """Return a server of ``/readers``, the group's lag and desired readers, and of ``/healthz``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            match self.path:
                case "/readers":
                    try:
                        self._answer(200, look(group, policy))
                    except rg.ReaderGroupError as error:  # KEDA then keeps the number of readers
                        self._answer(503, {"error": str(error)})
                case "/healthz":
                    self._answer(200, {"status": "ok"})
                case _:
                    self._answer(404, {"error": "there are /readers and /healthz"})

        def _answer(self, status: int, document: dict[str, object]) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    return ThreadingHTTPServer(("", port), Handler)


def look(group: rg.ReaderGroup, policy: rg.ReaderScalingPolicy) -> dict[str, object]:
    decision = group.scaling_decision(policy)
    lag = group.lag()
    return {
        "desired_readers": decision.desired_readers,
        "reason": decision.reason,
        "readers": decision.current_readers,
        "segments": len(lag.segments),
        "lag_events": lag.events,
        "lag_seconds": round(lag.seconds, 3),
    }


def serve(name: str, policy: rg.ReaderScalingPolicy, port: int) -> None:
    with rg.connect() as client:
        answering = server(client.groups.get(name), policy, port)
        # In a thread: `shutdown` waits for the loop that the signal interrupts.
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=answering.shutdown).start())
        with answering:
            answering.serve_forever()


def show(folder: Path) -> None:
    """Fill four segments with events that no reader reads."""
    with rg.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(4))
        group = client.groups.create("billing", streams=["shop/orders"])
        with client.writer("shop/orders") as writer:
            for number in range(1000):
                writer.write(b"order %d" % number, routing_key=f"customer-{number}")

        policy = rg.ReaderScalingPolicy(min_readers=1, max_readers=20, target_lag_seconds=0.1, cooldown_seconds=0)
        with server(group, policy, 0) as answering:
            threading.Thread(target=answering.serve_forever, daemon=True).start()
            answer: dict[str, object] = {}
            pause = threading.Event()
            while answer.get("desired_readers") != 4:  # never more readers than segments
                pause.wait(0.1)
                with urlopen(f"http://127.0.0.1:{answering.server_port}/readers", timeout=10) as response:
                    answer = json.load(response)
            answering.shutdown()
        print(f"{answer['lag_events']} events behind, {answer['readers']} readers")
        print(f"KEDA would start {answer['desired_readers']} readers")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", nargs="?", type=Path, help="of the SQLite file")
    arguments.add_argument("--group", help="serve this group of the store at READERGROUP_URL")
    arguments.add_argument("--port", type=int, default=8080)
    arguments.add_argument("--min-readers", type=int, default=1)
    arguments.add_argument("--max-readers", type=int, default=10)
    arguments.add_argument("--target-lag-seconds", type=float, default=5.0)
    given = arguments.parse_args()
    if given.group:
        policy = rg.ReaderScalingPolicy(
            min_readers=given.min_readers,
            max_readers=given.max_readers,
            target_lag_seconds=given.target_lag_seconds,
        )
        serve(given.group, policy, given.port)
    else:
        show(given.folder or Path(mkdtemp()))
