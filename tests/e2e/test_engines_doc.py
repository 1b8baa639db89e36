"""The door of docs/engines.md, its nginx before an engine with a key: loads pass, and each wrong thing is named."""

import base64
import datetime
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from loadgen.__main__ import main as loadgen
from scripts.processes import free_port
from scripts.proxybench.proxies import binary
from tests.fakes.scripted_engine import ScriptedEngine
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
LOAD = ("-o", "load.jsonl", "--number", "3", "--parallel", "1", "--prompt-tokens", "20", "--output-tokens", "2")
PORTS = ("8443", "expired", "mutual", "plain", "8444", "8001")


def fenced(language: str, containing: str) -> str:
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return next(block for block in blocks if containing in block)


REPORTED = {
    "no password": "/v1/models: HTTP 401 of Basic authentication; expected --header-env Authorization=VARIABLE, in it ",
    "password": "/v1/models: HTTP 401 with the password that was sent; expected a valid password in $GATE",
    "engine's key": "/v1/models: HTTP 401 with the key that was sent; expected a valid key in $ENGINE",
    "no `--ca`": ": TLS: the certificate is of an unknown authority; expected --ca FILE with its certificate",
    "host": ": TLS: the certificate is for another host; expected the host name that it was issued for",
    "name that is no host's": ": the host name ",
    "expired certificate": ": TLS: the certificate has expired; expected a valid one",
    "port with no server": ": connection refused; expected a server on port 8444",
    "`http://`": ": plain HTTP on a TLS port; expected https:// instead of http://",
    "`https://` to the tap's port": ": TLS: the port has no TLS; expected http:// instead of https://",
    "path": "/v1/models: HTTP 404; expected an engine's base URL, or --model NAME",
    "no `--cert`": "/v1/models: HTTP 400, client certificate missing or refused; expected --cert and --key",
}
"""Errors by the one thing that is wrong; each from after the URL."""


def with_more_servers(conf: str) -> str:
    """The configuration with servers of an expired certificate, of clients' certificates, and of plain HTTP."""
    [server] = re.findall(r"  server \{.*^  \}\n", conf, re.DOTALL | re.MULTILINE)
    expired = server.replace("8443", "expired").replace("door.pem", "expired.pem").replace("door.key", "expired.key")
    asks = "ssl_client_certificate ca.pem; ssl_verify_client on;"
    mutual = server.replace("8443", "mutual").replace("client_max", f"{asks} client_max")
    return conf.replace(server, server + expired + mutual + "  server { listen 127.0.0.1:plain; }\n")


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """Folder of a running nginx, and the ports that stand for those of the page."""
    nginx = binary("nginx")
    if nginx is None:
        pytest.skip("nginx is not installed")
    folder, authority = tmp_path_factory.mktemp("door"), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    for name, end in {"door": None, "expired": past}.items():
        made = authority.issue_cert("localhost", not_after=end)
        made.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
        made.private_key_pem.write_to_path(folder / f"{name}.key")
    (folder / "users").write_text("me:{PLAIN}open-sesame\n")
    folder.chmod(0o755)
    with ScriptedEngine(authorization="Bearer sk-engine").serving() as engine:
        ports = {name: str(free_port()) for name in PORTS} | {"8001": engine.url.rpartition(":")[2]}
        conf = re.sub(
            rf":({'|'.join(PORTS)})\b", lambda result: f":{ports[result[1]]}", with_more_servers(fenced("nginx", "ssl"))
        )
        user = "user root;" if folder.owner() == "root" else ""
        (folder / "nginx.conf").write_text(f"daemon off; {user}\n{conf}")
        process = subprocess.Popen([nginx, "-p", str(folder), "-c", "nginx.conf", "-e", "nginx.log"])
        try:
            while not (folder / "nginx.pid").exists():  # written once it listens
                assert process.poll() is None, (folder / "nginx.log").read_text()
            yield folder, ports
        finally:
            process.terminate()
            process.wait()


@pytest.fixture
def flags(door: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The page's flags, with the port that nginx has here; their variables are set."""
    folder, ports = door
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GATE", f"Basic {base64.b64encode(b'me:open-sesame').decode()}")
    monkeypatch.setenv("ENGINE", "Bearer sk-engine")
    result = re.search(r"^DOOR='(.*)'$", fenced("sh", "DOOR="), re.MULTILINE)
    assert result is not None
    return shlex.split(result[1].replace("8443", ports["8443"]))


def test_load_of_the_engines_page(flags: list[str]) -> None:
    assert loadgen([*flags, *LOAD, "--overwrite"]) == 0
    assert [record.status for record in load_trace("load.jsonl")[1]] == ["ok"] * 3


def changed(wrong: str, flags: list[str], ports: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flags, or the environment, with one thing wrong."""
    port, url, ca = ports["8443"], flags[1], flags[2:4]
    match wrong:
        case "no password":
            return [*flags[:4], *flags[6:]]
        case "password":
            monkeypatch.setenv("GATE", "Basic bWU6d3Jvbmc=")
        case "engine's key":
            monkeypatch.setenv("ENGINE", "Bearer sk-wrong")
        case "no `--ca`":
            return [*flags[:2], *flags[4:]]
    rest = {
        "host": url.replace("localhost", "127.0.0.1"),
        "name that is no host's": url.replace("localhost", "engine.invalid"),
        "expired certificate": url.replace(port, ports["expired"]),
        "port with no server": url.replace(port, ports["8444"]),
        "`http://`": url.replace("https", "http"),
        "`https://` to the tap's port": url.replace(port, ports["plain"]),
        "path": url.replace("team-a", "team-b"),
        "no `--cert`": url.replace(port, ports["mutual"]),
    }
    return ["--url", rest.get(wrong, url), *ca, *flags[4:]]


@pytest.mark.parametrize("wrong", REPORTED)
def test_connection_errors_have_their_fix(
    wrong: str, door: tuple[Path, dict[str, str]], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ports = door
    given = changed(wrong, flags, ports, monkeypatch)
    expected = REPORTED[wrong].replace("8444", ports["8444"])
    with pytest.raises(InputError) as error:
        loadgen([*given, *LOAD])
    shown = str(error.value).replace("engine.invalid", "").removeprefix("--url: ")
    assert expected in shown, shown
