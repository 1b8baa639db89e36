"""The tap as a command: how it starts, refuses, survives its recorder, ends; and that it keeps no content."""

import asyncio
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.tap.conftest import ANSWER, COMPLETION, TapCommand, answer, upstream_of
from tests.waiting import until
from tests.warmstart import run_warm


def run_tap(lab: Any, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A tap that is expected to refuse."""
    return run_warm("tap", *arguments, cwd=lab.folder, env=lab.environment() | environment)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_prints_the_summary(lab: Any, number: signal.Signals) -> None:
    started = asyncio.Event()

    async def slow(request: Any) -> None:
        if request.target == b"/v1/completions":
            request.write_sse_head()
            await request.write_event({"choices": [{"index": 0, "text": "x"}]})
            started.set()
            await asyncio.sleep(0.5)
            await request.write_event({"choices": [{"index": 0, "text": "y", "finish_reason": "length"}]})
            await request.write_event(None)
            request.end_chunks()
        else:
            request.write_json({})

    async def scenario() -> None:
        async with upstream_of(lab, slow) as port, lab.command(port) as tap:
            in_flight = asyncio.create_task(tap.post("/v1/completions", {**COMPLETION, "stream": True}))
            await started.wait()
            await tap.end(number)
            assert (await in_flight).endswith(b"0\r\n\r\n"), "what was in flight ended as it should"
            assert tap.code == 0, tap.errors
            assert "1 of 1 requests recorded; hashed 100.0%" in tap.output

    asyncio.run(scenario())
    [record] = lab.records
    assert record.status == "ok"
    summary = json.loads((lab.folder / "captured.jsonl.summary.json").read_text())
    assert (summary["offered"], summary["recorded"], summary["dropped"]) == (1, 1, {})


def test_tls_upstream_is_verified(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(lab.folder / "authority.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)

    async def scenario() -> None:
        async with upstream_of(lab, answer, tls=context) as port:
            url = f"https://localhost:{port}"
            flags = ("--upstream", url, "--listen", "127.0.0.1:0", "-o", "t.jsonl", "--tokenizer", "ids")
            distrusting = await asyncio.to_thread(run_tap, lab, *flags)
            assert (distrusting.returncode, "is of an unknown authority; expected --ca FILE" in distrusting.stderr) == (
                2,
                True,
            )
            monkeypatch.setenv("SSL_CERT_FILE", str(lab.folder / "authority.pem"))
            async with lab.command(port, "--upstream", url) as tap:
                assert b"200 OK" in await tap.post("/v1/completions", COMPLETION)
                await tap.end()

    asyncio.run(scenario())
    assert len(lab.records) == 1


def test_tap_started_before_its_engine_and_lost_trace_file(lab: Any) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "tap", "--upstream", f"http://127.0.0.1:{port}", "--listen", "127.0.0.1:0"]

    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec(
            *(*command, "-o", str(lab.trace), "--tokenizer", "ids", "--no-engine-facts"),
            env=lab.environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        tap = TapCommand(process, 0, "")
        try:
            await tap.printed("CLIENTS GET 503 until it can")
            process.send_signal(signal.SIGHUP)
            upstream = lab.upstream(answer)
            upstream.port = port
            async with upstream.serving():
                assert process.stdout is not None
                line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
                actual = re.match(r"tap: listening on http://127\.0\.0\.1:(\d+),", line)
                assert actual is not None, line
                tap.port, tap.output = int(actual[1]), line
                assert b"200 OK" in await tap.post("/v1/completions", COMPLETION)
                await until(lambda: lab.trace.read_bytes().count(b"\n") == 2)
                lab.trace.unlink()
                assert "1 RECORDS ARE LOST" in await tap.printed("captured.jsonl: deleted, moved or changed")
                await tap.post("/v1/completions", COMPLETION)
                await tap.end()
            assert (tap.code, "Traceback" in tap.errors) == (0, False), tap.errors
            assert f"blocks keyed by {lab.folder / 'keys' / 'key'}; Ctrl-C or SIGTERM ends it" in tap.output
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()

    asyncio.run(scenario())
    assert len(lab.records) == 1
    assert (lab.summary["offered"], lab.summary["recorded"], lab.summary["dropped"]) == (2, 1, {"trace_lost": 1})
    assert {path.stat().st_mode & 0o777 for path in lab.folder.iterdir() if path.is_file()} == {0o600}


def arguments_of(tap: TapCommand) -> bytes:
    processes = (tap.process.pid, *tap.pids("tap.proxy.worker"), *tap.pids("tap.recorder.recorder"))
    assert len(processes) == 3
    return b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes)


def written_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_control_calls_have_the_taps_key_and_requests_the_clients(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary-taps-own")
    monkeypatch.setenv("GATE", "canary-gate")
    flags = ("--header-env", "X-Gate=GATE", "--tokenizer", "engine", "--block-size", "4")
    seen: dict[bytes, list[bytes]] = {}

    async def guarded(request: Any) -> None:
        seen[request.target] = request.values(b"authorization") + request.values(b"x-gate")
        if request.target == b"/v1/models":
            request.write_json({"error": seen[request.target][0].decode()}, b"401 Unauthorized")
        elif request.target == b"/tokenize":
            request.write_json({"tokens": [1, 2, 3, 4, 5]})
        else:
            request.write_json(ANSWER)

    async def scenario() -> None:
        async with upstream_of(lab, guarded) as port, lab.command(port, *flags, warm=False) as tap:
            await tap.post(
                "/v1/completions", {**COMPLETION, "prompt": "text"}, b"Authorization: Bearer canary-client\r\n"
            )
            await until(lambda: b"/tokenize" in seen)  # before the ending processes are in its way
            arguments = arguments_of(tap)
            await tap.end()
            control_key = [b"Bearer canary-taps-own", b"canary-gate"]
            assert seen == {
                **dict.fromkeys((b"/version", b"/metrics", b"/v1/models", b"/tokenize"), control_key),
                b"/v1/completions": [b"Bearer canary-client"],
            }
            assert "/v1/models: HTTP 401 with the key that was sent; expected a valid key in" in tap.errors
            assert b"canary" not in written_in(lab.folder) + arguments + (tap.output + tap.errors).encode()

    asyncio.run(scenario())
    assert len(lab.records[0].block_hashes) == 1
