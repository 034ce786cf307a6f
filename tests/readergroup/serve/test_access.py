"""What the web view refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import readergroup as rg
from readergroup.serve.access import OPEN_PATHS, SESSION_SECONDS
from readergroup.serve.application import app
from synchronizer import SystemClock
from tests.readergroup.serve.serving import GROUP, LOCAL, STREAM, TOKEN, bearer, filled, viewed

SECRETS = ["/groups", f"/groups/{GROUP}", f"/groups/{GROUP}/desired-readers", "/metrics", "/session", "/events"]


@pytest.fixture
def client(store_url: str) -> Iterator[rg.Client]:
    with filled(store_url) as client:
        yield client


def log_in(browser: TestClient) -> None:
    assert browser.post("/login", json={"token": TOKEN}).status_code == 204


def csrf(browser: TestClient) -> dict[str, str]:
    return {"x-readergroup-csrf": browser.get("/session").json()["csrf"]}


@pytest.mark.parametrize("path", SECRETS)
def test_without_the_token_nothing_is_told(client: rg.Client, path: str) -> None:
    with viewed(client, token=TOKEN) as browser:
        for headers in (
            {},
            bearer("wrong"),
            bearer(TOKEN + "x"),
            bearer(TOKEN[:-1]),
            bearer(""),
            {"authorization": TOKEN},
            {"authorization": f"Basic {TOKEN}"},
            {"authorization": b"Bearer \xff\xfe"},
            {"cookie": f"readergroup={TOKEN}"},
        ):
            answer = browser.get(path, headers=headers)
            assert answer.status_code == 401, headers
            assert answer.headers["www-authenticate"] == "Bearer"
            assert GROUP not in answer.text and TOKEN not in answer.text
        assert browser.get(f"{path}?token={TOKEN}").status_code == 401  # addresses are logged and kept


def test_what_is_open_tells_nothing_of_the_store(client: rg.Client) -> None:
    with viewed(client, token=TOKEN) as browser:
        for path in OPEN_PATHS - {"/login"}:
            answer = browser.get(path)
            assert answer.status_code == 200, path
            assert GROUP not in answer.text and client.store.url not in answer.text


def test_the_token_is_good_as_a_header_and_by_the_cookie_of_the_login(client: rg.Client) -> None:
    with viewed(client, token=TOKEN) as browser:
        assert browser.get("/groups", headers=bearer()).status_code == 200
        assert browser.post("/login", json={"token": "wrong"}).status_code == 401
        assert browser.get("/groups").status_code == 401
        answer = browser.post("/login", json={"token": TOKEN})
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
        assert browser.get("/groups").status_code == 200
        assert browser.get("/groups", headers=bearer("wrong-but-long-enough")).status_code == 401
        assert browser.post("/logout", headers=csrf(browser)).status_code == 204
        assert browser.get("/groups").status_code == 401


def test_over_tls_the_cookie_does_not_leave_it(client: rg.Client) -> None:
    with TestClient(app(client, token=TOKEN), base_url="https://readers.example") as browser:
        assert "Secure" in browser.post("/login", json={"token": TOKEN}).headers["set-cookie"]


def test_a_cookie_is_good_for_a_while_and_for_this_token_only(store_url: str) -> None:
    class MovedClock(SystemClock):
        moved = 0.0

        def time(self) -> float:
            return super().time() + self.moved

    clock = MovedClock()
    with rg.connect(store_url, clock=clock) as client, viewed(client, token=TOKEN) as browser:
        log_in(browser)
        (name, value), *_ = browser.cookies.items()
        with viewed(client, token=TOKEN[::-1]) as other:
            assert other.get("/groups", headers={"cookie": f"{name}={value}"}).status_code == 401
        expires, _, signature = value.partition(".")
        for forged in (
            f"{int(expires) + 1}.{signature}",
            f"{expires}.",
            f".{signature}",
            f"{'9' * 30}.{signature}",
            "ä",
        ):
            with viewed(client, token=TOKEN) as other:
                cookie = f"{name}={forged}".encode()
                assert other.get("/groups", headers={"cookie": cookie}).status_code == 401, forged
        clock.moved = SESSION_SECONDS + 1
        assert browser.get("/groups").status_code == 401


def test_another_name_of_this_machine_is_refused(client: rg.Client) -> None:
    """A site that lets its name point here could read the answers in the browser of a user."""
    with viewed(client) as browser:
        for host in (
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:8420",
            "",
            "[::1",
            "a@localhost:1@x",
        ):
            for path in ("/", "/groups", "/healthz", "/metrics"):
                assert browser.get(path, headers={"host": host}).status_code == 421, host
        for host in ("localhost", "LOCALHOST:8420", "127.0.0.1:1", "[::1]:8420"):
            assert browser.get("/groups", headers={"host": host}).status_code == 200, host


def test_with_a_token_any_host_is_good_unless_some_are_named(client: rg.Client) -> None:
    with viewed(client, token=TOKEN) as browser:
        assert browser.get("/groups", headers={**bearer(), "host": "readers.example"}).status_code == 200
    with viewed(client, token=TOKEN, hosts=["readers.example"]) as browser:
        assert browser.get("/groups", headers={**bearer(), "host": "readers.example"}).status_code == 200
        assert browser.get("/groups", headers=bearer()).status_code == 421


def test_every_answer_forbids_foreign_scripts_frames_and_caches(client: rg.Client) -> None:
    with viewed(client) as browser:
        for path in ("/", "/page.js", "/groups", "/nothing", "/groups/nope", "/metrics"):
            headers = browser.get(path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"


def test_the_page_has_nothing_in_line_and_nothing_from_elsewhere(client: rg.Client) -> None:
    with viewed(client) as browser:
        page, script, style = (browser.get(path).text for path in ("/", "/page.js", "/page.css"))
    for inline in ("<style", "style=", "onclick", "onload", "javascript:", "<script>"):
        assert inline not in page
    for foreign in ("http://", "https://", "//cdn", "@import"):
        assert foreign not in page and foreign not in style
        assert foreign not in script.replace("http://www.w3.org/2000/svg", "")
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser"):
        assert unsafe not in script


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/page.js/../../access.py",
        "/page/index.html",
        "/groups/../../x",
        "//etc/passwd",
        "/page.py",
        "/__init__.py",
        "/groups/billing/%2e%2e/%2e%2e/metrics",
    ],
)
def test_no_path_leads_out_of_the_page(client: rg.Client, path: str) -> None:
    async def ask() -> int:
        """Without a client, which would tidy the path up."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request"}

        scope = {
            "type": "http",
            "method": "GET",
            "path": path.replace("%2e", "."),
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
            "scheme": "http",
        }
        await app(client)(scope, receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(ask()) in (404, 405)


def test_what_is_too_long_is_refused(client: rg.Client) -> None:
    with viewed(client, allow_writes=True) as browser:
        assert browser.get("/groups?" + "a" * 50_000).status_code == 414
        assert browser.get("/" + "a" * 10_000).status_code == 414
        headers = {**csrf(browser), "content-type": "application/json"}
        answer = browser.post(f"/groups/{GROUP}/reset", content=b" " * 100_000, headers=headers)
        assert answer.status_code == 400


@pytest.mark.parametrize("body", [b"", b"[" * 10_000, b'{"token":5}', b'{"token":NaN}', b"\xff", b'"text"', b'{"a":1}'])
def test_a_login_that_is_no_login_is_refused(client: rg.Client, body: bytes) -> None:
    with viewed(client, token=TOKEN) as browser:
        answer = browser.post("/login", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and "set-cookie" not in answer.headers


def test_a_web_socket_is_refused(client: rg.Client) -> None:
    with viewed(client) as browser, pytest.raises(Exception), browser.websocket_connect("/events"):  # noqa: B017
        pass


def test_the_view_can_be_mounted_in_another_application(client: rg.Client) -> None:
    outer = Starlette(routes=[Mount("/readers", app(client, token=TOKEN))])
    with TestClient(outer, base_url=LOCAL) as browser:
        assert "<title>readergroup</title>" in browser.get("/readers/").text
        assert browser.get("/readers/page.js").status_code == 200
        assert browser.get("/readers/groups").status_code == 401
        answer = browser.post("/readers/login", json={"token": TOKEN})
        assert "Path=/readers" in answer.headers["set-cookie"]
        assert browser.get("/readers/groups").json()["groups"][0]["group"] == GROUP


# ---------------------------------------------------------------------- changes


def test_without_allow_writes_nothing_can_be_changed(client: rg.Client) -> None:
    with viewed(client, token=TOKEN) as browser:
        for change in ("reset", "checkpoint", "remove-reader", "scale"):
            answer = browser.post(f"/groups/{GROUP}/{change}", json={}, headers=bearer())
            assert answer.status_code == 403
            assert "--allow-writes" in answer.json()["error"]
        assert browser.get("/session", headers=bearer()).json()["writes"] is False


def test_a_change_needs_the_same_origin_and_the_text_that_only_the_page_knows(client: rg.Client) -> None:
    def reset(headers: dict[str, str]) -> int:
        return browser.post(f"/groups/{GROUP}/reset", json={"to": "tail"}, headers=headers).status_code

    with viewed(client, token=TOKEN, allow_writes=True) as browser:
        log_in(browser)
        good = csrf(browser)
        assert reset({}) == 403
        assert reset({"x-readergroup-csrf": "guess"}) == 403
        assert reset({**good, "origin": "https://evil.example"}) == 403
        for origin in ("null", "http://[", "127.0.0.1:8420", f"{LOCAL}.evil.example"):
            assert reset({**good, "origin": origin}) == 403
        assert reset({**good, "sec-fetch-site": "cross-site"}) == 403
        assert reset({**good, "sec-fetch-site": "same-site"}) == 403
        assert client.groups.get(GROUP).lag().events == 100
        form = browser.post(
            f"/groups/{GROUP}/reset", content=b'{"to":"tail"}', headers={**good, "content-type": "text/plain"}
        )
        assert form.status_code == 400
        assert (
            browser.post("/login", json={"token": TOKEN}, headers={"origin": "https://evil.example"}).status_code == 403
        )
        assert client.groups.get(GROUP).lag().events == 100
        assert reset({**good, "origin": LOCAL, "sec-fetch-site": "same-origin"}) == 200
        assert client.groups.get(GROUP).lag().events == 0


def test_a_program_with_the_token_needs_no_page(client: rg.Client) -> None:
    with viewed(client, token=TOKEN, allow_writes=True) as browser:
        answer = browser.post(f"/groups/{GROUP}/reset", json={"to": "tail"}, headers=bearer())
        assert answer.json() == {"done": "reset to tail"}


def test_each_change_does_what_it_says(client: rg.Client) -> None:
    group = client.groups.get(GROUP)
    with viewed(client, allow_writes=True) as browser:
        headers = csrf(browser)

        def change(name: str, /, **body: Any) -> Any:
            answer = browser.post(f"/groups/{GROUP}/{name}", json=body, headers=headers)
            return answer.json() if answer.status_code == 200 else answer.status_code

        assert change("reset", to="tail") == {"done": "reset to tail"}
        assert group.lag().events == 0
        assert change("checkpoint", name="at-the-end") == {"done": "took checkpoint at-the-end"}
        assert change("reset", to="head") == {"done": "reset to head"}
        assert group.lag().events == 100
        assert change("reset", to="at-the-end", is_checkpoint=True) == {"done": "reset to checkpoint at-the-end"}
        assert group.lag().events == 0
        assert change("scale", stream=STREAM, split=[0]) == {"done": f"split: {STREAM} has 5 segments"}
        assert change("scale", stream=STREAM, merge=[4, 5]) == {"done": f"merged: {STREAM} has 4 segments"}
        with group.reader("r1") as reader:
            assert change("remove-reader", reader="r1") == {"done": "removed reader r1"}
            assert group.online_readers() == []
            with pytest.raises(rg.ReaderNotInGroupError):
                reader.read(timeout=0)
        for name, body in (
            ("reset", {"to": "nowhere"}),
            ("reset", {"to": "nightly", "is_checkpoint": True}),
            ("reset", {}),
            ("reset", {"to": "tail", "extra": 1}),
            ("checkpoint", {"name": "../../x"}),
            ("scale", {"stream": "other/stream", "split": [0]}),
            ("scale", {"stream": STREAM, "split": [-1]}),
            ("scale", {"stream": STREAM, "split": ["0"]}),
            ("scale", {"stream": STREAM, "split": [999]}),
            ("scale", {"stream": STREAM}),
            ("remove-reader", {"reader": 5}),
        ):
            assert change(name, **body) == 400, (name, body)
        assert change("delete") == 404
        assert browser.post("/groups/nope/reset", json={"to": "tail"}, headers=headers).status_code == 404


def test_the_token_is_never_logged(client: rg.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with viewed(client, token=TOKEN, allow_writes=True) as browser:
        log_in(browser)
        browser.get("/groups", headers=bearer(TOKEN + "wrong"))
        browser.get("/groups", headers=bearer())
        browser.post(f"/groups/{GROUP}/reset", json={"to": "tail"}, headers=bearer())
    with pytest.raises(rg.InvalidArgumentError) as refused:
        app(client, token="hunter2")
    assert "reset to tail" in caplog.text
    assert TOKEN not in caplog.text and "hunter2" not in str(refused.value)
