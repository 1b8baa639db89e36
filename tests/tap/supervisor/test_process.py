"""The tap as a command: how it starts, refuses, survives its recorder, ends; and that it keeps no content."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme

from scripts.proxybench.processes import ended
from tests.tap.conftest import ANSWER, COMPLETION, TapCommand, answer, upstream_of
from tests.waiting import until
from tests.warmstart import run_warm


def run_tap(lab: Any, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A tap that is expected to refuse."""
    return run_warm("tap", *arguments, cwd=lab.folder, env=lab.environment() | environment)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_writes_everything_and_prints_the_account(lab: Any, number: signal.Signals) -> None:
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


def test_an_engine_that_goes_away_and_comes_back_is_told_once_each(lab: Any) -> None:
    async def scenario() -> None:
        upstream = lab.upstream(answer)
        async with contextlib.AsyncExitStack() as engine:
            await engine.enter_async_context(upstream.serving())
            async with lab.command(upstream.port) as tap:
                assert (await tap.post("/v1/completions", COMPLETION)).startswith(b"HTTP/1.1 200")
                await engine.aclose()
                for _ in range(4):
                    assert b" 502 " in await tap.post("/v1/completions", COMPLETION)
                async with upstream.serving():
                    for _ in range(4):
                        assert (await tap.post("/v1/completions", COMPLETION)).startswith(b"HTTP/1.1 200")
                await tap.end()
        told = [line.partition(f"http://127.0.0.1:{upstream.port} ")[2] for line in tap.errors.splitlines()]
        assert [line for line in told if line and "fails" not in line] == [
            f"takes no connection (connection refused; expected a server on port {upstream.port}); CLIENTS GET 502 "
            "until it does",
            "is back",
        ]

    asyncio.run(scenario())


def test_a_killed_tap_loses_nothing_that_its_recorder_was_given(lab: Any) -> None:
    async def scenario() -> None:
        async with upstream_of(lab) as port, lab.command(port) as tap:
            for _ in range(5):
                await tap.post("/v1/completions", COMPLETION)
            await asyncio.sleep(0.1)
            recorder = tap.recorder_pid()
            tap.process.kill()
            await until(lambda: ended(recorder))

    asyncio.run(scenario())
    assert len(lab.records) == 5


def test_an_upstream_behind_tls_is_reached_and_verified(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_nothing_of_what_was_said_is_in_any_file_or_output(lab: Any) -> None:
    canaries = [
        "prompt",
        "chat",
        "answer",
        "bearer",
        "cookie",
        "apikey",
        "errorbody",
        "session",
        "user",
        "query",
        "tool",
    ]
    marks = {name: f"KANARIE-{name}-7391" for name in canaries}

    async def script(request: Any) -> None:
        if b"fail" in request.target:
            request.write_json({"error": {"message": marks["errorbody"]}}, b"400 Bad Request")
        elif b"chat" in request.target:
            request.write_sse_head()
            await request.write_event({"choices": [{"index": 0, "delta": {"content": marks["answer"]}}]})
            await request.write_event({"error": {"message": marks["errorbody"]}})
            request.end_chunks()
        else:
            choice = {"index": 0, "text": marks["answer"], "finish_reason": "stop"}
            request.write_json({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 3}})

    headers = (
        f"Authorization: Bearer {marks['bearer']}\r\nCookie: c={marks['cookie']}\r\nX-Api-Key: {marks['apikey']}\r\n"
        f"X-Session-ID: {marks['session']}\r\nX-Request-Id: {marks['session']}\r\n"
    ).encode()

    async def scenario() -> None:
        async with (
            upstream_of(lab, script) as port,
            lab.command(port, "--tokenizer", "bytes", "--no-engine-facts") as tap,
        ):
            tool = {"type": "function", "function": {"name": marks["tool"]}}
            chat = {
                "messages": [{"role": "user", "content": marks["chat"]}],
                "user": marks["user"],
                "tools": [tool],
                "stream": True,
            }
            await tap.post("/v1/completions", {"model": "m", "prompt": marks["prompt"] * 9}, headers)
            await tap.post("/v1/chat/completions", chat, headers)
            await tap.post(f"/v1/completions?fail={marks['query']}", {"prompt": marks["prompt"]}, headers)
            await tap.post("/v1/completions", f"{marks['prompt']} is no object", headers)
            await until(lambda: lab.trace.read_bytes().count(b"\n") == 5)
            os.kill(tap.recorder_pid(), signal.SIGKILL)
            await tap.post(
                "/v1/chat/completions", {"messages": marks["chat"], "model": {"a": marks["prompt"]}}, headers
            )
            await tap.end()
            assert tap.code == 0
            written = b"".join(path.read_bytes() for path in lab.folder.rglob("*") if path.is_file())
            assert b"/v1/chat/completions" in written
            for name, mark in marks.items():
                assert mark.encode() not in written, f"{name} is in a file"
                assert mark not in tap.output + tap.errors, f"{name} is in the output"
            assert b"KANARIE" not in written

    asyncio.run(scenario())


def refusals() -> Sequence[Any]:
    return [
        pytest.param(["--upstream", "ftp://x"], "--upstream", id="no URL"),
        pytest.param(["--listen", "nowhere"], "--listen", id="no address"),
        pytest.param(["--listen", "203.0.113.7:80"], "--listen", id="not our address"),
        pytest.param(["--tokenizer", "/no/such/place"], "no tokenizer there", id="no tokenizer"),
        pytest.param(["--tokenizer", "."], "no tokenizer there", id="a directory without a tokenizer"),
        pytest.param(["-o", "/no/such/folder/t.jsonl"], "/no/such/folder", id="no such folder"),
        pytest.param(["-o", "."], "is a directory", id="a directory"),
        pytest.param(["-o", "/dev/full"], "/dev/full", id="full disk"),
        pytest.param(["--block-size", "0"], "--block-size", id="block size"),
        pytest.param(["--key-file", "/dev/null"], "/dev/null", id="no key"),
    ]


def test_a_busy_port_and_an_existing_trace_are_refused_and_nothing_is_overwritten(lab: Any) -> None:
    async def scenario() -> None:
        async with upstream_of(lab) as port:
            common = ("--upstream", f"http://127.0.0.1:{port}", "--tokenizer", "ids")
            busy = await asyncio.to_thread(run_tap, lab, *common, "--listen", f"127.0.0.1:{port}", "-o", "new.jsonl")
            assert (busy.returncode, (lab.folder / "new.jsonl").exists()) == (2, False)
            assert "in use" in busy.stderr
            lab.trace.write_text("precious\n")
            kept = await asyncio.to_thread(run_tap, lab, *common, "--listen", "127.0.0.1:0", "-o", str(lab.trace))
            assert kept.returncode == 2
            assert "--overwrite" in kept.stderr
            assert lab.trace.read_text() == "precious\n"
            async with lab.command(port, "--overwrite") as tap:
                await tap.end()

    asyncio.run(scenario())
    assert lab.records == []


def test_a_tap_before_its_engine_goes_on_when_it_comes_and_when_its_trace_goes(lab: Any) -> None:
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
            await tap.said("CLIENTS GET 503 until it can")
            process.send_signal(signal.SIGHUP)
            upstream = lab.upstream(answer)
            upstream.port = port
            async with upstream.serving():
                assert process.stdout is not None
                line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
                found = re.match(r"tap: listening on http://127\.0\.0\.1:(\d+),", line)
                assert found is not None, line
                tap.port, tap.output = int(found[1]), line
                assert b"200 OK" in await tap.post("/v1/completions", COMPLETION)
                await until(lambda: lab.trace.read_bytes().count(b"\n") == 2)
                lab.trace.unlink()
                assert "1 RECORDS ARE LOST" in await tap.said("captured.jsonl: deleted, moved or changed")
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


def test_the_taps_own_calls_have_its_key_and_relayed_requests_the_clients(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            own = [b"Bearer canary-taps-own", b"canary-gate"]
            assert seen == {
                **dict.fromkeys((b"/version", b"/metrics", b"/v1/models", b"/tokenize"), own),
                b"/v1/completions": [b"Bearer canary-client"],
            }
            assert "/v1/models: HTTP 401 with the key that was sent; expected a key that it takes in" in tap.errors
            assert b"canary" not in written_in(lab.folder) + arguments + (tap.output + tap.errors).encode()

    asyncio.run(scenario())
    assert len(lab.records[0].block_hashes) == 1
