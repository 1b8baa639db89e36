"""``tap``: a reverse proxy that records traffic's shape, timing and prefix sharing, not its content."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from engines.access import add_access_arguments, read_access
from engines.dialect import DialectName
from engines.routing import ROUTE_HELP
from tracefile.commandline.durations import duration
from tracefile.commandline.ending import run_command
from tracefile.commandline.parser import Parser, same_named
from tracefile.records.latenames import LateModule, late_modules
from tracefile.storage.output import output_name

if TYPE_CHECKING:
    import asyncio

    from tap.logs import command as readlog
    from tap.prompts import promptstart
    from tap.proxy import livepolicy
    from tap.supervisor import config as settings
    from tap.supervisor import service, upstreamlist
    from tracefile.hashing import hashkey
    from wire import loop
else:  # processes and an event loop, which the flags need not
    asyncio, loop = LateModule("asyncio"), LateModule("wire.loop")
    hashkey = LateModule("tracefile.hashing.hashkey")
    readlog = LateModule("tap.logs.command")
    livepolicy, promptstart = LateModule("tap.proxy.livepolicy"), LateModule("tap.prompts.promptstart")
    settings, service, upstreamlist = late_modules("tap.supervisor", "config service upstreamlist")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
EPILOG = """\
"tap read-log" makes a trace of a request log, as if a tap had recorded it.

examples:
  tap --upstream http://localhost:8000 --listen :8001 --tokenizer engine --inject auto -o monday.jsonl.zst
  tap --upstreams engines.txt --route session --workers 2 -o tap.jsonl.zst --resume --rotate-age 1h
"""


def parser() -> Parser:
    made = Parser(
        prog="tap",
        description=__doc__.partition(": ")[2] if __doc__ else None,
        epilog=EPILOG,
        commands=["read-log"],
    )
    _add_traffic(made.add_argument_group("traffic"))
    _add_routing(made.add_argument_group("several upstreams"))
    _add_trace(made.add_argument_group("trace"))
    _add_hashes(made.add_argument_group("block hashes"))
    _add_engine(made.add_argument_group("engine"))
    add_access_arguments(made, "the tap's own calls to the engine; --ca, --cert and --key for relayed requests, too")
    _add_limits(made.add_argument_group("limits"))
    return made


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--upstream",
        action="append",
        default=[],
        metavar="URL",
        help="base URL of the engine, or of a gateway before it; may be repeated (required, or --upstreams)",
    )
    group.add_argument(
        "--upstreams",
        type=Path,
        help="file with a URL a line, instead of --upstream; drain before a URL: no new sessions; stop: no "
        "requests; # begins a comment; read again on SIGHUP",
    )
    group.add_argument(
        "--listen",
        default="127.0.0.1:8001",
        metavar="HOST:PORT",
        help="address that clients connect to; no host, as :8001: all addresses; port 0: a free port",
    )
    group.add_argument(
        "--tls-cert", metavar="FILE", help="serve clients over HTTPS with this PEM chain; read again on SIGHUP"
    )
    group.add_argument("--tls-key", metavar="FILE", help="PEM key of --tls-cert, if in another file")
    group.add_argument("--workers", type=int, default=1, help="relaying processes that share the port")
    group.add_argument(
        "--admin",
        metavar="HOST:PORT",
        help="address of /healthz, /readyz, /metrics and a live page, such as 127.0.0.1:9001",
    )
    group.add_argument(
        "--admin-name",
        action="append",
        default=[],
        metavar="NAME",
        help="host name of the admin pages; may be repeated; IP addresses, localhost, names without a dot and names in "
        ".svc, .cluster.local and .internal need none",
    )


def _add_routing(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--route", default="round-robin", metavar="POLICY", help=ROUTE_HELP)
    group.add_argument(
        "--route-kb",
        type=float,
        default=16.0,
        metavar="KB",
        help="start of a request's body that prefix and overlap compare, as hashes",
    )
    group.add_argument(
        "--kv-events",
        action="append",
        default=[],
        metavar="UPSTREAM=ADDRESS",
        help="KV events of an upstream, vLLM's --kv-events-config, as tcp://HOST:PORT, and after a comma its replay "
        "address: what its cache lost is not looked for there; may be repeated",
    )
    group.add_argument(
        "--health-check",
        metavar="PATH",
        help="page of the upstreams, such as /health, that is asked for; one that fails gets no requests",
    )
    group.add_argument("--health-interval", type=duration, default="5s", help="between two checks of an upstream")
    group.add_argument("--health-fall", type=int, default=3, help="failed checks in a row that take an upstream out")
    group.add_argument(
        "--health-rise", type=int, default=2, help="checks in a row without failure that take it in again"
    )
    group.add_argument(
        "--eject-after",
        type=int,
        default=5,
        help="responses 500, 502, 503 or 504 in a row after which an upstream gets no requests for 1 to 30 s; 0: never",
    )


def _add_trace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-o",
        "--output",
        metavar="TRACE",
        help="the trace to write: .jsonl, .jsonl.zst or .jsonl.gz (default: a new name in this folder)",
    )
    group.add_argument("--overwrite", action="store_true", help="replace an existing trace")
    group.add_argument("--resume", action="store_true", help="append to an existing trace")
    group.add_argument("--rotate-mb", type=float, metavar="MB", help="start a new segment of the trace at this size")
    group.add_argument("--rotate-age", type=duration, help="start a new segment of the trace at this age, such as 1h")
    group.add_argument(
        "--keep",
        type=duration,
        help="delete closed segments of this age, such as 30d, when another closes: two at most, never the newest, nor "
        "one without write permission",
    )
    group.add_argument(
        "--keep-gb",
        type=float,
        metavar="GB",
        help="delete the oldest closed segments, with the same exceptions, while all take more, such as 200",
    )
    group.add_argument(
        "--file-mode",
        default="0600",
        metavar="MODE",
        help="permissions of the trace and the files beside it (default 0600: their owner alone)",
    )
    group.add_argument(
        "--upload",
        metavar="URL",
        help="upload closed segments here: s3://bucket/folder, or any URL that fsspec supports",
    )
    group.add_argument(
        "--sample",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of sessions to record, each as a whole, such as 0.1",
    )
    group.add_argument(
        "--keep-header",
        action="append",
        default=[],
        metavar="NAME",
        help="request header to keep in records, such as x-team; may be repeated; names of secrets are refused",
    )


def _add_hashes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tokenizer",
        default="auto",  # as AUTO in tap.supervisor.config
        metavar="PATH|engine|bytes|ids",
        help="source of the hashed token ids: the model's tokenizer directory; engine: its /tokenize, after the "
        "request is relayed; bytes: UTF-8 bytes; ids: only prompts sent as ids (default: engine if it has /tokenize, "
        "else bytes)",
    )
    group.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        help="block size of the hashes (default 16, or the engine's of 8 to 15); if the engine's is smaller, "
        "records tell to the token where prompts part",
    )
    group.add_argument(
        "--hash",
        choices=["xxh3_64", "blake2b"],
        default="xxh3_64",
        dest="algorithm",
        help="hash algorithm; blake2b for traces that you give away",
    )
    group.add_argument(
        "--key-file",
        type=Path,
        help="secret key of the hashes, made if missing; hashes of two keys never match (default $KVTAPE_KEY_FILE, or "
        "~/.config/kvtape/key)",
    )
    group.add_argument(
        "--model", metavar="NAME", help="model name to record, of which hash chains start (default: the engine's)"
    )
    group.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME",
        help="served model name of a LoRA adapter: its blocks match no other model's; may be repeated",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="auto|usage|token-ids",
        help="request usage or token ids where clients did not, and remove them from responses; auto: both, as far as "
        "each upstream's engine has them; may be repeated",
    )
    group.add_argument(
        "--dialect",
        choices=get_args(DialectName),
        help="the engine, if its metrics do not tell (default: as they tell, else vllm)",
    )
    group.add_argument(
        "--engine-facts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask the upstream's /version, /metrics and /v1/models at start and every 30 s, for the trace's header "
        "(default: yes)",
    )
    group.add_argument(
        "--engine-metrics-interval",
        type=duration,
        default="0",
        help="sample the engine's /metrics at this interval into TRACE.engine.jsonl, on the trace's clock, "
        "such as 1s; 0: never",
    )
    group.add_argument(
        "--wait",
        type=duration,
        help="end with an error if no upstream accepts connections in this time, such as 10m (default: wait for ever; "
        "clients get 503 meanwhile)",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-body-mb",
        type=float,
        default=16.0,
        metavar="MB",
        help="largest body that is recorded in full; larger bodies are only relayed",
    )
    group.add_argument(
        "--queue-mb",
        type=float,
        default=256.0,
        metavar="MB",
        help="memory for bodies that wait for the recorder; beyond it records are dropped and counted",
    )
    group.add_argument(
        "--log-interval",
        type=duration,
        default="30s",
        help="print the account at this interval while there is news; 0: never",
    )
    group.add_argument(
        "--drain", type=duration, default="30s", help="time that requests in flight have to end after SIGTERM or Ctrl-C"
    )


def read_config(argv: Sequence[str]) -> "settings.TapConfig":
    args = parser().parse_args(argv)
    _check_numbers(args)
    livepolicy.live_route(args.route)
    output = output_name(args.output, "tap", resume=args.resume)
    trace = settings.checked_trace(output, overwrite=args.overwrite, resume=args.resume, inputs=_inputs(args))
    listed = upstreamlist.checked_upstreams(args.upstream, args.upstreams)
    made = {
        "trace": trace,
        "upstreams": listed.origins,
        "draining": listed.draining,
        "stopped": listed.stopped,
        "route_bytes": int(args.route_kb * KIB),
        "kv_events": settings.checked_kv_events(args.kv_events, listed.origins, args.route),
        "health_check": upstreamlist.checked_health(
            args.health_check, args.health_interval, args.health_fall, args.health_rise
        ),
        "upstreams_file": args.upstreams,
        "listen": settings.checked_listen("--listen", args.listen),
        "certificate": settings.checked_certificate(args.tls_cert, args.tls_key),
        "access": read_access(args),
        "rotate_bytes": None if args.rotate_mb is None else int(args.rotate_mb * MIB),
        "rotate_s": args.rotate_age,
        "keep_s": args.keep,
        "keep_bytes": None if args.keep_gb is None else int(args.keep_gb * GIB),
        "sample": settings.checked_sample(args.sample),
        "keep_headers": settings.checked_headers(args.keep_header),
        "upload": settings.checked_upload(args.upload),
        "tokenizer": settings.checked_tokenizer(args.tokenizer),
        "loras": tuple(args.lora),
        "max_body_bytes": int(args.max_body_mb * MIB),
        "queue_bytes": int(args.queue_mb * MIB),
        "inject": settings.checked_injection(args.inject, args.dialect),
        "inject_auto": settings.AUTO in settings.injection_words(args.inject),
        "engine_metrics_s": args.engine_metrics_interval,
        "admin": None if args.admin is None else settings.checked_listen("--admin", args.admin),
        "wait_s": args.wait,
        "file_mode": settings.checked_mode(args.file_mode),
        "admin_names": tuple(name.lower() for name in args.admin_name),
        "drain_s": args.drain,
        "log_interval_s": args.log_interval,
    }
    return settings.TapConfig(**(same_named(settings.TapConfig, args) | made))


def _inputs(args: argparse.Namespace) -> list[Path]:
    tokenizer = None if args.tokenizer in (settings.AUTO, *settings.NAMED_TOKENIZERS) else Path(args.tokenizer)
    files = (args.key_file or hashkey.key_path(), args.upstreams, tokenizer)
    pems = (args.ca, args.cert, args.key, args.tls_cert, args.tls_key)
    return [path for path in (*files, *(Path(pem) for pem in pems if pem is not None)) if path is not None]


def _check_numbers(args: argparse.Namespace) -> None:
    if args.block_size is not None:
        settings.at_least("--block-size", args.block_size, 1)
    settings.check_workers(args.workers)
    settings.at_least("--route-kb", args.route_kb, promptstart.PIECE_BYTES / KIB)
    settings.at_least("--eject-after", args.eject_after, 0)
    settings.more_than_zero("--rotate-mb", args.rotate_mb)
    settings.more_than_zero("--rotate-age", args.rotate_age)
    settings.more_than_zero("--keep", args.keep)
    settings.more_than_zero("--keep-gb", args.keep_gb)
    settings.check_rotation(args)
    settings.at_least("--max-body-mb", args.max_body_mb, 0)
    settings.at_least("--queue-mb", args.queue_mb, 0)


def umask_of(file_mode: int) -> int:
    """Return the umask for files of ``file_mode``; their owner, who may not be root, can enter folders."""
    return 0o677 & ~file_mode


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["read-log"]:
        return readlog.main(argv[1:])
    config = read_config(argv)
    run, serve = loop.run, service.serve  # imported with the user's umask: other users may read compiled modules
    os.umask(umask_of(config.file_mode))  # of the tap's other processes, too
    try:
        run(serve(config))
    except asyncio.CancelledError:  # told to end before it had begun
        return 130
    return 0


def command() -> None:
    run_command("tap", main)


if __name__ == "__main__":
    command()
