"""The way of scripts to an engine that is there: keys and TLS for their own calls, and as flags for the commands."""

import argparse
import ssl
from pathlib import Path

import pytest
import trustme

from engines.access import Access
from scripts import job
from scripts.job import Workspace, add_engine_arguments
from tests.fakes.scripted_engine import ScriptedEngine


def workspace(folder: Path, *flags: str) -> Workspace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=folder)
    add_engine_arguments(parser)
    return Workspace.of(parser.parse_args(flags))


def test_an_engine_behind_a_door_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    monkeypatch.setattr(job, "RESET_TIMEOUT_S", 0.0)
    ca = str(tmp_path / "ca.pem")
    with ScriptedEngine(tls=tls, authorization="Bearer canary").serving() as engine:
        work = workspace(tmp_path, "--url", engine.url, "--ca", ca, "--header", "X-Team: blue")
        assert work.way == ["--ca", ca, "--header", "X-Team: blue"]
        work.empty_cache(engine.url)
        assert engine.paths[-1] == "POST /reset_prefix_cache"
        with pytest.raises(SystemExit, match="without a key; expected one in"):
            Workspace(tmp_path, access=Access(tls=work.access.tls)).empty_cache(engine.url)
