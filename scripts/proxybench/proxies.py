"""Proxies of the benchmark: none, nginx, and the tap with complete recording."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scripts.processes import child_named, free_port, is_listening, pin, serving
from wire.process import module_command, module_environment

PROXY_CORE, LOAD_CORE = 1, 0

# nginx's recommended settings for streams: keep-alive on both sides, no buffering, no log. Requests are sent in pieces
# of up to 128 KB; with the default of 16 KB, a long prompt takes three times as long.
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
    """A running proxy; without a proxy, ``port`` is the upstream's."""

    name: str
    port: int
    pid: int | None = None
    """Pid of the data-plane process."""
    recorder: int | None = None
    account: dict[str, Any] = field(default_factory=dict)
    """Request counts of the tap, after its end."""


def binary(name: str) -> str | None:
    """Return the path of a program, in PATH or Debian's sbin folders."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def nginx(program: str, folder: Path, upstream: int) -> Iterator[Proxy]:
    """Run nginx with one worker."""
    port, config = free_port(), folder / "nginx.conf"
    config.write_text(NGINX_CONF.format(folder=folder, upstream=upstream, port=port))
    command, log = [program, "-c", str(config), "-e", str(folder / "nginx.log")], folder / "nginx.out"
    with serving(command, partial(is_listening, port), log, "nginx", core=PROXY_CORE) as process:
        yield Proxy("nginx", port, child_named(process.pid, "worker process"))


@contextlib.contextmanager
def tap(folder: Path, upstream: int) -> Iterator[Proxy]:
    """Run the tap with complete recording and hashing; ``account`` is set after the block."""
    port, trace, log = free_port(), folder / "captured.jsonl", folder / "tap.log"
    flags = ("--upstream", f"http://127.0.0.1:{upstream}", "--listen", f"127.0.0.1:{port}", "-o", str(trace))
    command = module_command("tap", *flags, "--tokenizer", "ids", "--no-engine-facts")
    environment = module_environment() | {"KVTAPE_KEY_FILE": str(folder / "key")}

    def is_ready() -> bool:  # the port accepts connections before the workers respond
        return b"listening on" in log.read_bytes()

    with serving(command, is_ready, log, "the tap", environment=environment, core=PROXY_CORE) as process:
        plane, recorder = (child_named(process.pid, module) for module in ("tap.proxy.worker", "tap.recorder.recorder"))
        pin(recorder, LOAD_CORE)
        proxy = Proxy("tap", port, plane, recorder)
        yield proxy
    proxy.account = json.loads(Path(f"{trace}.summary.json").read_bytes())
