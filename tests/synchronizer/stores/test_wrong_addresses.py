"""What people write into an address who have it from memory: each is refused in words, and none shows a password."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from synchronizer import InvalidArgumentError, NotFoundError, ReaderGroupError, StoreUnavailableError, open_store
from synchronizer.stores.nats import address as nats_address
from tests.servers.nats import NatsServer


@pytest.mark.parametrize(
    "url",
    [
        "nats://",
        "nats:///readergroup",
        "nats://host/readergroup",
        "nats://host:soon",
        "nats://host:99999",
        "nats://a,,b",
    ],
)
def test_what_is_no_nats_server_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="write nats://host:4222"):
        open_store(url)


@pytest.mark.parametrize("url", ["nats://a:1,nats://b", "nats://a:1, b/", "nats://me:secret@a:1,b:4222"])
def test_nats_servers_may_be_written_in_more_than_one_way(url: str) -> None:
    assert nats_address.parse_address(url).servers == ("nats://a:1", "nats://b:4222")


@pytest.mark.parametrize("scheme", ["nats", "postgresql"])
@pytest.mark.parametrize(
    "password", ["hun@ter2", "hun?ter2", "hun?t=ter2", "hun?ter2=x", "hun&ter2@", "h@un?ter2", "?hun#ter2&ter2"]
)
def test_a_password_with_special_characters_is_not_quoted_in_errors(scheme: str, password: str) -> None:
    with pytest.raises(ReaderGroupError) as raised:
        open_store(f"{scheme}://me:{password}@127.0.0.1:1/?timeout_seconds=0.1".replace("/?", "?"))
    assert "ter2" not in str(raised.value)


@pytest.mark.parametrize("url", ["nats://me:hun@a,me:hunter2@b", "postgresql:/me:hunter2@a", "host=a password=hunter2"])
def test_no_password_is_shown_of_what_is_hardly_an_address(url: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        open_store(url)
    assert "hun" not in str(raised.value)


@pytest.mark.parametrize("option", ["credentials", "nkey"])
def test_a_file_of_credentials_that_is_not_there_is_named(option: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{option}.*correct its path.*none.creds"):
        open_store(f"nats://127.0.0.1:1?{option}={tmp_path}/none.creds")


def test_a_server_that_speaks_no_tls_is_not_spoken_to_where_the_address_demands_it(nats_url: str) -> None:
    with pytest.raises(StoreUnavailableError, match="requires TLS, but the server does not"):
        open_store(f"{nats_url}&tls=require&timeout_seconds=2")


def test_a_store_that_is_not_there_yet_may_be_made(nats_url: str, postgres_url: str) -> None:
    for url in (nats_url, postgres_url):
        with pytest.raises(NotFoundError, match="no store.*create a store"):
            open_store(url, must_exist=True)


def test_a_nats_server_that_wants_a_login_says_which_parts_of_the_address_to_correct() -> None:
    password = "p@ss:w/rd?#%&,+ "
    with NatsServer(settings=[f'authorization {{ user: me, password: "{password}" }}']) as server:
        with open_store(server.url.replace("//", f"//me:{quote(password, safe='')}@")) as store:
            assert store.create("s")
        with pytest.raises(StoreUnavailableError, match="user:password@"):
            open_store(f"{server.url}?timeout_seconds=2")
