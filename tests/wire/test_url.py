"""Addresses, good and bad."""

import pytest

from wire.errors import WireError
from wire.url import Origin, parse_listen, parse_url


def test_good_urls() -> None:
    assert parse_url("http://localhost:8000") == Origin("http", "localhost", 8000)
    assert parse_url("https://api.example.com/v2/") == Origin("https", "api.example.com", 443, "/v2")
    assert parse_url("http://[::1]:8000").host_header == b"[::1]:8000"
    assert parse_url("https://h").host_header == b"h"
    assert parse_url("http://h/base").target("/v1/x?y") == b"/base/v1/x?y"


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://h", "http://", "http://h:port", "http://h:99999", "http://u@h"]
)
def test_bad_urls_are_named(url: str) -> None:
    with pytest.raises(WireError, match=r"expected|port|host"):
        parse_url(url)


def test_listen_addresses() -> None:
    assert parse_listen("127.0.0.1:0") == ("127.0.0.1", 0)
    assert parse_listen("[::1]:80") == ("::1", 80)
    assert parse_listen(":8001") == ("0.0.0.0", 8001)
    for bad in ("8001", "h:", "h:x", "h:70000", "h:-1"):
        with pytest.raises(WireError, match="HOST:PORT"):
            parse_listen(bad)
