"""``readergroup serve``: the web view of a store."""

from __future__ import annotations

import errno
import ipaddress
import socket
from pathlib import Path
from typing import Annotated, Final

import typer

from .screen import say
from .session import Failed, WrongUsage, ended_by_signal, session

#: How long the system tries to send to a peer that does not read.
_UNREAD_SECONDS: Final = 60


def serve(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8420,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="READERGROUP_SERVE_TOKEN",
            help="What a browser or scraper has to know; at least 16 characters. Other users of this machine can see"
            " it on the command line: prefer --token-file or the environment.",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the token.", show_default=False)
    ] = None,
    allow_writes: Annotated[
        bool,
        typer.Option(
            "--allow-writes",
            help="Let the page reset groups, take checkpoints, remove readers, scale streams, and replay or discard "
            "dead letters.",
        ),
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks at all groups, while someone looks.")
    ] = 5.0,
) -> None:
    """Serve a page that shows the groups of the store, metrics for Prometheus, and JSON for KEDA.

    Ends with Ctrl-C. Without a token it listens on this machine only. docs/howto/see-it-in-a-browser.md lists the
    addresses.
    """
    if token_file is not None:
        token = token_file.read_bytes().decode(errors="replace").strip()
    is_local = _is_loopback(host)
    if not is_local and token is None:
        raise WrongUsage(f"listening on {host} needs a token; use --token-file or READERGROUP_SERVE_TOKEN")
    from ..serve.access import LOOPBACK
    from ..serve.application import app

    try:
        from ..serve.server import Server
    except ImportError as error:
        from synchronizer.extras import install_hint

        raise Failed(f"the web view needs uvicorn; {install_hint('serve')}") from error
    with session(context).connect() as client, _listening(host, port) as listening:
        view = app(
            client,
            token=token,
            allow_writes=allow_writes,
            hosts={*LOOPBACK, host} if is_local else None,
            sample_interval_seconds=interval,
        )
        name = f"[{host}]" if ":" in host else host
        say(f"http://{name}:{listening.getsockname()[1]}/{' (changes are allowed)' if allow_writes else ''}")
        server = Server(view)
        with ended_by_signal(server.stop):
            server.run(sockets=[listening])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections from now on, so that the printed address works at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # a label of the name that is empty or too long
        raise Failed(f"cannot listen on {host}: {getattr(error, 'strerror', error)}; choose another --host") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a connection that is closed while its peer does not read ends too
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREAD_SECONDS)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        option = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise Failed(f"cannot listen on {host}, port {port}: {error.strerror}; choose another {option}") from error
    return listening
