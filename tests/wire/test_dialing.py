"""Ways to a server over real sockets: TLS, proxies, and the step that failed, by name."""

import asyncio
import contextlib
import datetime
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trustme

from wire.client.dialing import speaks_tls
from wire.client.pool import ConnectError, ConnectionPool
from wire.errors import WireError
from wire.tls import SYSTEM_TLS, Tls, client_context
from wire.url import Origin

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return str(path)


def files_of(certificate: trustme.LeafCert, folder: Path) -> tuple[str, str]:
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(key)
    return str(chain), str(key)


def context_of(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return context


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        await reader.read()
    writer.close()


async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    writer.close()


async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.transport.abort()


@contextlib.asynccontextmanager
async def serving(accept: Accept = silent, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # handshakes that are refused
    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0.01)


async def reached(origin: Origin, tls: Tls = SYSTEM_TLS, timeout_s: float = 10.0) -> str:
    """The reason against a connection, or the protocol that it speaks."""
    try:
        connection = await ConnectionPool(origin, tls=tls, connect_timeout_s=timeout_s).connect()
    except ConnectError as error:
        return f"{error.kind}: {error.reason}"
    assert connection.transport is not None
    secure = connection.transport.get_extra_info("ssl_object")
    spoken = "plain" if secure is None else str(secure.selected_alpn_protocol())
    connection.abort()
    await asyncio.sleep(0)
    return spoken


def expiring(authority: trustme.CA) -> trustme.LeafCert:
    return authority.issue_cert("localhost", not_after=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))


def test_certificate_error_has_its_check(authority: trustme.CA, ca: str) -> None:
    async def scenario() -> None:
        good, second = context_of(authority.issue_cert("localhost")), context_of(authority.issue_cert("engine.example"))
        good.set_alpn_protocols(["h2", "http/1.1"])
        async with serving(tls=good) as port:
            assert await reached(Origin("https", "localhost", port), Tls(ca)) == "http/1.1"
            assert await reached(Origin("https", "localhost", port)) == (
                "tls_failed: TLS: the certificate is of an unknown authority; expected --ca FILE with its certificate"
            )
            assert await reached(Origin("https", "127.0.0.1", port), Tls(ca)) == (
                "tls_failed: TLS: the certificate is for another host; expected the host name that it was issued for"
            )
            assert await speaks_tls(Origin("http", "127.0.0.1", port), 5.0)
        async with serving(tls=second) as port:
            assert "is for another host" in await reached(Origin("https", "localhost", port), Tls(ca))
        async with serving(tls=context_of(expiring(authority))) as port:
            assert await reached(Origin("https", "localhost", port), Tls(ca)) == (
                "tls_failed: TLS: the certificate has expired; expected a valid one"
            )

    asyncio.run(scenario())


def test_connection_error_has_its_step(ca: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        free = sock.getsockname()[1]

    async def scenario() -> None:
        assert await reached(Origin("http", "localhost", free)) == (
            f"connect_refused: connection refused; expected a server on port {free}"
        )
        assert await reached(Origin("http", "engine.invalid", 80)) == (
            "connect_failed: the host name engine.invalid does not resolve; expected a known one"
        )
        async with serving(http) as port:
            assert await reached(Origin("https", "localhost", port), Tls(ca)) == (
                "tls_failed: TLS: the port has no TLS; expected http:// instead of https://, or another port"
            )
            assert not await speaks_tls(Origin("http", "127.0.0.1", port), 5.0)
        async with serving(closing) as port:
            assert "closed the connection within the handshake" in await reached(Origin("https", "localhost", port))
        async with serving() as port:
            assert await reached(Origin("https", "localhost", port), timeout_s=0.1) == (
                "connect_timeout: no connection within 0.1 s; expected a TLS port"
            )

    asyncio.run(scenario())


def test_changed_ca_file_is_reloaded(authority: trustme.CA, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(file)
    tls = Tls(str(file))
    assert client_context(tls) is client_context(tls)

    async def scenario() -> None:
        async with serving(tls=context_of(authority.issue_cert("localhost"))) as port:
            origin = Origin("https", "localhost", port)
            assert "unknown authority" in await reached(origin, tls)
            authority.cert_pem.write_to_path(file)
            assert await reached(origin, tls) == "None"

    asyncio.run(scenario())


def test_invalid_certificate_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no PEM")
    chain, key = files_of(trustme.CA().issue_cert("localhost"), tmp_path)
    for tls, printed in {
        Tls(ca="gone.pem"): "--ca gone.pem: No such file",
        Tls(ca=str(nonsense)): f"--ca {nonsense}: no certificate or crl found; expected a file of PEM",
        Tls(cert="gone.pem"): "--cert gone.pem: cannot be read",
        Tls(cert=chain, key=str(nonsense)): f"--cert and --key {chain}, {nonsense}: ",
        Tls(key=key): f"--key {key}: without --cert",
    }.items():
        with pytest.raises(WireError) as error:
            client_context(tls)
        assert str(error.value).startswith(printed)
        assert "; expected " in str(error.value)
    monkeypatch.setenv("SSL_CERT_FILE", "gone.pem")
    with pytest.raises(WireError, match=r"SSL_CERT_FILE=gone\.pem: not there; expected"):
        client_context(SYSTEM_TLS)
