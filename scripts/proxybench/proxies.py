"""Proxies under measurement: none, nginx, and the tap as it is meant to run, with everything recorded."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.proxybench.processes import child_named, free_port, pin, until_listening
from scripts.proxybench.tapprocess import running_tap

PROXY_CORE, LOAD_CORE = 1, 0

# Each as its own manual would have it for token streams: connections kept on both sides, nothing buffered, no log.
# nginx passes a request on as it comes, in pieces of up to 128 KB; with its default of 16 KB a long prompt takes it
# three times as long.
NGINX_CONF = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log crit;
worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_max_body_size 64m; keepalive_requests 100000000;
  client_body_buffer_size 128k;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engine {{ server 127.0.0.1:{upstream}; keepalive 1024; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""


@dataclass(slots=True)
class Proxy:
    """A proxy that runs, or none: then ``port`` is the upstream's own."""

    name: str
    port: int
    pid: int | None = None
    """The data-plane process."""
    recorder: int | None = None
    token_ids: bool = True
    """Whether prompts go as token ids, as text otherwise."""
    account: dict[str, Any] = field(default_factory=dict)
    """What the tap said of every request, once it has ended."""


@contextlib.asynccontextmanager
async def running(command: Sequence[str], port: int, **options: Any) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A process on the proxies' core until the block ends, from when its port answers."""
    process = subprocess.Popen(command, **options)  # noqa: ASYNC220  once, before anything is measured
    try:
        pin(process.pid, PROXY_CORE)
        await until_listening(port, process)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait)


def binary(name: str) -> str | None:
    """Path of a daemon of Debian, on the PATH of users or not."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")


@contextlib.asynccontextmanager
async def nginx(folder: Path, upstream: int) -> AsyncIterator[Proxy]:
    """nginx with one worker."""
    port, own = free_port(), folder / "nginx"
    own.mkdir()
    config = own / "nginx.conf"
    config.write_text(NGINX_CONF.format(folder=own, upstream=upstream, port=port))
    command = [binary("nginx") or "nginx", "-c", str(config), "-e", str(own / "nginx.log")]
    async with running(command, port) as process:
        worker = await child_named(process.pid, "worker process")
        pin(worker, PROXY_CORE)
        yield Proxy("nginx", port, worker)


@contextlib.asynccontextmanager
async def tap(folder: Path, upstream: int, tokenizer: str, flags: Sequence[str]) -> AsyncIterator[Proxy]:
    """The tap with full recording and hashing; at the end the proxy's account is the summary that the tap kept."""
    own = folder / tokenizer
    own.mkdir()
    async with running_tap(own, upstream, ["--tokenizer", tokenizer, *flags]) as command:
        plane, recorder = await command.pid("worker"), await command.pid("recorder")
        for pid in (command.process.pid, plane):
            pin(pid, PROXY_CORE)
        pin(recorder, LOAD_CORE)
        proxy = Proxy(f"tap {tokenizer}", command.port, plane, recorder, tokenizer != "bytes")
        yield proxy
        await command.end()
        proxy.account = command.account


def version(name: str) -> str | None:
    """A daemon's version as it prints it; null where it is not installed."""
    path = binary(name)
    if path is None:
        return None
    said = subprocess.run([path, "-v"], capture_output=True, text=True, check=False)
    found = re.search(r"\d+\.\d+[\w.+~-]*", said.stdout + said.stderr)
    return found[0] if found else "unknown"
