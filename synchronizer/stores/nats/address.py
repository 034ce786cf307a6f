"""Parses an address ``nats://…``: the servers, the login, TLS, and the options of the store."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote

from synchronizer.errors import InvalidArgumentError

_DEFAULT_PORT: Final = 4222
_STREAM_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,200}")
_SUBJECT: Final = re.compile(r"[!-)+-\-/-=?-~]+(\.[!-)+-\-/-=?-~]+)*")  # tokens that contain none of . * >
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]")
_OPTIONS: Final = (
    "stream",
    "replicas",
    "max_bytes",
    "durable",
    "timeout_seconds",
    "credentials",
    "nkey",
    "tls",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_hostname",
    "inbox_prefix",
)


@dataclass(frozen=True)
class NatsAddress:
    url: str  # without secrets
    servers: tuple[str, ...]
    stream: str = "readergroup"
    replicas: int | None = None
    max_bytes: int = -1
    is_durable: bool = False
    timeout_seconds: float = 5.0
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    credentials_file: str | None = None
    nkey_file: str | None = None
    inbox_prefix: str = "_INBOX"
    tls: ssl.SSLContext | None = None
    tls_hostname: str | None = None


def parse_address(url: str) -> NatsAddress:
    """Parse ``nats://user:password@host:port,host:port?option=value``. No error shows a password."""
    rest, _, query = url.partition("://")[2].partition("?")
    login, _, hosts = rest.rpartition("@")
    if "@" in login or "@" in query:
        # Part of the password would be taken for a host or an option, and named in errors.
        raise InvalidArgumentError(
            "the address has more than one @; write user and password once, before the first host, and special "
            "characters as %xx"
        )
    options = _options(query)
    user, password, token = _login(login)
    return NatsAddress(
        url=_shown(login, hosts, query),
        servers=tuple(_server(host) for host in hosts.rstrip("/").split(",")),
        stream=_stream(options.get("stream", "readergroup")),
        replicas=_replicas(options.get("replicas")),
        max_bytes=_bytes(options.get("max_bytes")),
        is_durable=_is_durable(options.get("durable")),
        timeout_seconds=_seconds(options.get("timeout_seconds", "5")),
        user=user,
        password=password,
        token=token,
        credentials_file=_file(options, "credentials"),
        nkey_file=_file(options, "nkey"),
        inbox_prefix=_inbox_prefix(options.get("inbox_prefix", "_INBOX")),
        tls=_tls(options),
        tls_hostname=options.get("tls_hostname"),
    )


def _options(query: str) -> Mapping[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        raise InvalidArgumentError(
            "the address has options that this store does not know; remove them", unknown=unknown, known=_OPTIONS
        )
    return options


def _login(login: str) -> tuple[str | None, str | None, str | None]:
    """Return user, password and token: either the first two or the last."""
    if not login:
        return None, None, None
    user, colon, password = login.partition(":")
    if not colon:
        return None, None, unquote(user)
    return unquote(user), unquote(password), None


def _shown(login: str, hosts: str, query: str) -> str:
    user = login.partition(":")[0] + "@" if ":" in login else ""  # a login without a colon is a token, and secret
    return f"nats://{user}{hosts}" + (f"?{query}" if query else "")


def _server(host: str) -> str:
    host = host.strip().removeprefix("nats://")  # each server may have it
    name, colon, port = host.rpartition(":")
    if not colon or port.endswith("]"):  # the end of an IPv6 address
        name, port = host, str(_DEFAULT_PORT)
    if not _HOST.fullmatch(name) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgumentError(
            "this is not a server; write nats://host:4222 or nats://host:4222,host:4222", host=host
        )
    return f"nats://{name}:{port}"


def _stream(name: str) -> str:
    if not _STREAM_NAME.fullmatch(name):
        raise InvalidArgumentError("the name of a stream must consist of letters, digits, - and _", stream=name)
    return name


def _inbox_prefix(subject: str) -> str:
    if not _SUBJECT.fullmatch(subject):
        raise InvalidArgumentError(
            "inbox_prefix must be a subject: words of visible ASCII characters, separated by dots, without * and >",
            inbox_prefix=subject,
        )
    return subject


def _replicas(text: str | None) -> int | None:
    if text is None:
        return None
    if text not in ("1", "3", "5"):
        raise InvalidArgumentError("replicas must be 1, 3 or 5", replicas=text)
    return int(text)


def _bytes(text: str | None) -> int:
    if text is None:
        return -1
    if not text.isdecimal() or int(text) == 0:
        raise InvalidArgumentError("max_bytes must be an integer >= 1", max_bytes=text)
    return int(text)


def _is_durable(text: str | None) -> bool:
    if text not in (None, "always"):
        raise InvalidArgumentError(
            "durable must be 'always', which says that all servers run with sync_interval: always; remove it otherwise",
            durable=text,
        )
    return text is not None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise InvalidArgumentError("timeout_seconds must be a number above 0 and below 3600", timeout_seconds=text)
    return seconds


def _file(options: Mapping[str, str], name: str) -> str | None:
    path = options.get(name)
    if path is not None and not os.access(path, os.R_OK):
        raise InvalidArgumentError(f"the file of the option {name!r} cannot be read; correct its path", path=path)
    return path


def _tls(options: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return the TLS context; None if no option asks for TLS."""
    if not any(name.startswith("tls") for name in options):
        return None
    if options.get("tls", "require") != "require":
        raise InvalidArgumentError("tls must be 'require'; remove the option otherwise", tls=options["tls"])
    if "tls_key" in options and "tls_cert" not in options:
        raise InvalidArgumentError("tls_key needs its certificate; add tls_cert")
    try:
        context = ssl.create_default_context(cafile=_file(options, "tls_ca"))
        if certificate := _file(options, "tls_cert"):
            context.load_cert_chain(certificate, _file(options, "tls_key"))
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgumentError(
            "the files of the TLS options cannot be loaded; correct tls_ca, tls_cert and tls_key", error=str(error)
        ) from error
    return context
