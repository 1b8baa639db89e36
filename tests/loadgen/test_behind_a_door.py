"""loadgen behind TLS of a private authority, a key and a base path: errors with one wrong thing at a time."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from loadgen.__main__ import main as loadgen
from tests.fakes.scripted_engine import ScriptedEngine
from tracefile.records.errors import InputError

CANARY = "canary-5f2b"
LOAD = ("--parallel", "2", "--number", "3", "--prompt-tokens", "20", "--output-tokens", "2")


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedEngine]:
    """An engine behind a gateway's TLS, key and path, as a user's environment has them."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    monkeypatch.chdir(tmp_path)
    engine = ScriptedEngine(tls=tls, authorization=f"Bearer {CANARY}", base_path="/team-a")
    with engine.serving():
        yield engine


def test_bad_rows_name_line_and_field(
    door: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(url: str, *flags: str) -> str:
        with pytest.raises(InputError) as error:
            loadgen(["--url", url, "-o", "t.jsonl", *LOAD, *flags])
        assert "\n" not in str(error.value)
        return str(error.value)

    url = f"{door.url}/team-a"
    assert "expected --ca FILE" in refused(url)
    assert "is for another host" in refused(url.replace("127.0.0.1", "localhost"), "--ca", "ca.pem")
    assert refused(url.replace("https", "http"), "--ca", "ca.pem").endswith(
        "plain HTTP on a TLS port; expected https:// instead of http://"
    )
    assert refused(f"{door.url}/team-b", "--ca", "ca.pem").endswith(
        "/team-b/v1/models: HTTP 404; expected an engine's base URL, or --model NAME"
    )
    monkeypatch.setenv("OPENAI_API_KEY", f"{CANARY}-old")
    assert refused(url, "--ca", "ca.pem").endswith(
        "HTTP 401 with the key that was sent; expected a valid key in $OPENAI_API_KEY"
    )
    # A gateway that lets the models be listed: the requests' own refusal names the variable, too.
    assert "HTTP 401 with the key that was sent" in refused(url, "--ca", "ca.pem", "--model", "scripted")
    assert "key in $OPENAI_API_KEY; the engine's settings on this page are unknown" in capfd.readouterr().err
    monkeypatch.delenv("OPENAI_API_KEY")
    assert refused(url, "--ca", "ca.pem").endswith(
        "HTTP 401 without a key; expected one in $OPENAI_API_KEY, or the variable of --api-key-env"
    )
    assert CANARY not in "".join(capfd.readouterr())
