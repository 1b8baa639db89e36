"""``tap``: a reverse proxy that records traffic's shape, timing and prefix sharing, not its content."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from engines.access import HEADER_NAME, SECRET_HEADER, add_access_arguments, read_access
from engines.detection import DIALECTS
from engines.dialect import DialectName
from engines.routing import ROUTE_HELP
from engines.tokenizer import tokenizer_folder
from tap.ipc.settings import AUTO, NAMED_TOKENIZERS, Injection, Settings, distinct_origins, read_upstreams
from tap.proxy.routing import live_route
from tracefile.commandline.durations import duration
from tracefile.commandline.exit_codes import run_command
from tracefile.commandline.parser import Parser, same_named
from tracefile.commandline.workers import usable_cores
from tracefile.hashing.hashkey import key_path
from tracefile.records.errors import InputError
from tracefile.storage.output import output_name, refuse_inputs
from wire.errors import WireError
from wire.url import parse_listen

MIB = 1 << 20
LARGEST = 1 << 32
"""Largest number of a flag: as MiB, it fits into 64 bits."""
WORKERS_A_CORE = 16
"""Limit of workers per core: more are a typing error, and would exhaust the machine's memory."""
EPILOG = """\
"tap read-log" converts a request log to a trace.

examples:
  tap --upstream http://localhost:8000 --listen :8001 --tokenizer engine --inject auto -o monday.jsonl.zst
  tap --upstreams engines.txt --route session --workers 2 -o tap.jsonl.zst --resume --rotate-age 1h
"""


def parser() -> Parser:
    tap_parser = Parser(
        prog="tap",
        description=__doc__.partition(": ")[2] if __doc__ else None,
        epilog=EPILOG,
        commands=["read-log"],
    )
    _add_traffic(tap_parser.add_argument_group("traffic"))
    _add_trace(tap_parser.add_argument_group("trace"))
    _add_hashes(tap_parser.add_argument_group("block hashes"))
    _add_engine(tap_parser.add_argument_group("engine"))
    add_access_arguments(tap_parser, "control calls to the engine; --ca, --cert and --key also for relayed requests")
    _add_settings(tap_parser)
    return tap_parser


def read_log_parser() -> Parser:
    log_parser = Parser(
        prog="tap read-log",
        description="convert a request log to a trace with token counts and block hashes.",
        epilog="examples:\n  tap read-log requests.jsonl --tokenizer /models/your-model -o monday.jsonl.zst\n",
    )
    add = log_parser.add_argument
    add("log", type=Path, help="OpenAI chat, batch or messages JSONL, or a gateway's rows")
    add("-o", "--output", required=True, metavar="OUT", help="trace to write; .gz, .zst")
    add("--overwrite", action="store_true", help="replace an existing OUT")
    add("--tokenizer", required=True, metavar="PATH|ids", help="source of token ids: the model's tokenizer")
    add("--endpoint", metavar="PATH", help="API of rows without a path, as /v1/messages (default: by the keys)")
    add("--block-size", type=int, default=16, metavar="TOKENS", help="block size of the hashes")
    add("--model", metavar="NAME", help="model name in the block hashes (default: the model of each request)")
    add("--hash", choices=["xxh3_64", "blake2b"], default="xxh3_64", dest="algorithm", help="hash algorithm")
    add("--key-file", type=Path, help="secret key of the hashes (default: the tap's)")
    return log_parser


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--upstream",
        action="append",
        default=[],
        metavar="URL",
        help="base URL of the engine, or of a gateway in front of it; may be repeated (required, or --upstreams)",
    )
    add(
        "--upstreams",
        metavar="FILE",
        dest="upstreams_file",
        help="file with one URL per line, instead of --upstream; # starts a comment; reloaded on SIGHUP",
    )
    add(
        "--listen",
        type=_address,
        default="127.0.0.1:8001",
        metavar="HOST:PORT",
        help="address that clients connect to; no host, as :8001: all addresses; port 0: a free port",
    )
    add(
        "--admin",
        type=_address,
        metavar="HOST:PORT",
        help="address of /healthz, /readyz and /metrics, such as 127.0.0.1:9001",
    )
    add("--workers", type=_workers, default=1, metavar="N", help="worker processes that share the port")
    add("--route", type=_route, default="round-robin", metavar="POLICY", help=f"{ROUTE_HELP}, among several upstreams")
    add(
        "--drain",
        type=duration,
        default="30s",
        dest="drain_s",
        help="time for requests in flight to finish after SIGTERM or Ctrl-C",
    )


def _add_trace(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "-o",
        "--output",
        metavar="TRACE",
        help="trace to write: .jsonl, .jsonl.zst or .jsonl.gz (default: a new name in the current folder)",
    )
    add("--overwrite", action="store_true", help="replace an existing trace")
    add("--resume", action="store_true", help="append to an existing trace")
    add(
        "--rotate-mb",
        type=_megabytes,
        metavar="MB",
        dest="rotate_bytes",
        help="start a new segment of the trace at this size",
    )
    add(
        "--rotate-age",
        type=_positive_duration,
        metavar="TIME",
        dest="rotate_s",
        help="start a new segment of the trace at this age, such as 1h",
    )
    add(
        "--keep",
        type=_positive_duration,
        metavar="TIME",
        dest="keep_s",
        help="delete closed segments older than this, such as 30d, at each rotation: at most two, never the newest or "
        "a segment without write permission",
    )
    add(
        "--upload",
        type=_upload_url,
        metavar="URL",
        help="upload closed segments to this URL: s3://bucket/folder, or any URL that fsspec supports",
    )
    add(
        "--keep-header",
        action="append",
        type=_header,
        default=[],
        metavar="NAME",
        dest="keep_headers",
        help="request header to record, such as x-team; may be repeated; headers with secrets are refused",
    )


def _add_hashes(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--tokenizer",
        default=AUTO,
        metavar="PATH|engine|ids",
        help="source of the hashed token ids: PATH: the model's tokenizer directory; engine: its /tokenize, called "
        "after the request; ids: sent by clients or by --inject (default: engine if it has /tokenize, else ids)",
    )
    add(
        "--block-size",
        type=_block_size,
        metavar="TOKENS",
        help="block size of the hashes (default 16, or the engine's if 8 to 15); if the engine's is smaller, records "
        "also have the token position where prompts diverge",
    )
    add(
        "--hash",
        choices=["xxh3_64", "blake2b"],
        default="xxh3_64",
        dest="algorithm",
        help="hash algorithm; blake2b for traces that leave your organisation",
    )
    add(
        "--key-file",
        metavar="FILE",
        help="secret key of the hashes, created if missing; hashes of two keys never match (default $KVTAPE_KEY_FILE, "
        "or ~/.config/kvtape/key)",
    )
    add("--model", metavar="NAME", help="model name to record and to hash (default: the engine's)")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="auto|usage|token-ids",
        help="request usage or token ids if the client did not, and remove them from the response; auto: both, as far "
        "as each engine supports them; may be repeated",
    )
    group.add_argument(
        "--dialect",
        choices=get_args(DialectName),
        help="engine dialect (default: detected by the engine's metrics, else vllm)",
    )
    group.add_argument(
        "--engine-facts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read the upstream's /version, /metrics and /v1/models at start and every 30 s, for the trace's header "
        "(default: yes)",
    )


def _add_settings(parser: Parser) -> None:
    add = parser.add_setting
    add("--lora", action="append", default=[], metavar="NAME", dest="loras", help="served name of a LoRA adapter")
    add("--file-mode", type=_mode, default="0600", metavar="MODE", help="permissions of the trace and its other files")
    add(
        "--max-body-mb",
        type=_megabytes,
        default="16",
        metavar="MB",
        dest="max_body_bytes",
        help="capture limit of a body; larger bodies are relayed but not recorded in full",
    )
    add(
        "--queue-mb",
        type=_megabytes,
        default="256",
        metavar="MB",
        dest="queue_bytes",
        help="memory for bodies queued for the recorder; beyond it, records are dropped and counted",
    )


def _refusal(text: str, expected: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r}; expected {expected}")


def _number(text: str, kind: Callable[[str], float], expected: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        raise _refusal(text, expected) from None
    if not 0 < value <= LARGEST:
        raise _refusal(text, f"{expected}, {LARGEST} at most")
    return value


def _megabytes(text: str) -> int:
    return int(_number(text, float, "a number above 0") * MIB)


def _block_size(text: str) -> int:
    return int(_number(text, int, "a whole number above 0"))


def _workers(text: str) -> int:
    """Parse a number of worker processes, bounded by cores: each worker uses 50 MB."""
    count = int(_number(text, int, "a whole number above 0"))
    most = WORKERS_A_CORE * usable_cores()
    if count > most:
        raise _refusal(text, f"{most} at most, {WORKERS_A_CORE} for each core")
    return count


def _positive_duration(text: str) -> float:
    value = duration(text)
    if not value:
        raise _refusal(text, "more than 0")
    return value


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_listen(text)
    except WireError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _route(text: str) -> str:
    live_route(text)
    return text


def _upload_url(text: str) -> str:
    if not re.match(r"[a-z][a-z0-9+.-]*://", text):
        raise _refusal(text, "a URL, such as s3://bucket/folder")
    return text


def _header(text: str) -> str:
    """Parse the name of a recorded header, in lower case; headers that may hold a secret are refused."""
    if not HEADER_NAME.fullmatch(text):
        raise _refusal(text, "the name of one header, such as X-Tenant")
    if SECRET_HEADER.search(text):
        raise argparse.ArgumentTypeError(f"{text!r} may hold a secret; expected another header")
    return text.lower()


def _mode(text: str) -> int:
    if not re.fullmatch("0?6[0-6][0-6]", text):
        raise _refusal(text, "permissions that let the owner read and write, such as 0640")
    return int(text, 8)


def read_settings(argv: Sequence[str]) -> Settings:
    """Return the settings of the flags. Raises InputError for contradicting flags, or flags that contradict files."""
    args = parser().parse_args(argv)
    trace = _checked_trace(args)
    if bool(args.upstream) == (args.upstreams_file is not None):
        reason = "both were given" if args.upstream else "none was given"
        raise InputError(f"--upstream URL, --upstreams FILE: {reason}; expected exactly one of the two")
    origins = distinct_origins((f"--upstream {url}", url) for url in args.upstream)
    values = {value for text in args.inject for value in text.split(",")}
    _check_rotation(args)
    if args.tokenizer not in (AUTO, *NAMED_TOKENIZERS):
        args.tokenizer = str(tokenizer_folder(Path(args.tokenizer), alternatives=", `engine` or `ids`"))
    fields = {
        "upstreams": origins if args.upstreams_file is None else read_upstreams(args.upstreams_file),
        "trace": trace,
        "access": read_access(args),
        "inject": _injections(values, args.dialect),
        "inject_auto": AUTO in values,
        "keep_headers": tuple(dict.fromkeys(args.keep_headers)),
        "loras": tuple(args.loras),
    }
    return Settings(**(same_named(Settings, args) | fields))


def _check_rotation(args: argparse.Namespace) -> None:
    """Raise InputError for a flag about closed segments without rotation."""
    if args.rotate_bytes is not None or args.rotate_s is not None:
        return
    for flag, value in (("--upload", args.upload), ("--keep", args.keep_s)):
        if value is not None:
            raise InputError(f"{flag}: needs closed segments; expected --rotate-mb or --rotate-age, too")


def _checked_trace(args: argparse.Namespace) -> str:
    if args.output is None and args.resume:
        raise InputError("--resume: needs --output; expected the trace to continue")
    path = output_name(args.output, "tap")
    refuse_inputs(path, _inputs(args))
    if args.overwrite and args.resume:
        raise InputError("--overwrite, --resume: both were given; expected one of the two at most")
    if str(path).endswith(".parquet"):
        raise InputError(f"--output {path}: not a line format; expected .jsonl, .jsonl.gz or .jsonl.zst")
    file = Path(path)
    if file.is_dir():
        raise InputError(f"--output {path}: is a directory; expected a file to write")
    if file.is_file() and file.stat().st_size and not args.overwrite and not args.resume:
        raise InputError(f"--output {path}: exists; expected a new file, --resume or --overwrite")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(f"--output {path}: cannot be written; expected an existing, writable folder")
    return path


def _inputs(args: argparse.Namespace) -> list[Path]:
    tokenizer = None if args.tokenizer in (AUTO, *NAMED_TOKENIZERS) else args.tokenizer
    files = (args.key_file or key_path(), args.upstreams_file, tokenizer)
    return [Path(path) for path in (*files, args.ca, args.cert, args.key) if path]


def _injections(values: set[str], dialect: DialectName | None) -> frozenset[Injection]:
    supported = get_args(Injection)
    if AUTO in values and len(values) > 1:
        raise InputError("--inject auto: includes all injections; expected auto alone")
    if AUTO in values:
        return frozenset(supported)
    for value in values:
        if value not in supported:
            raise InputError(f"--inject {value}: expected auto, {' or '.join(supported)}")
        if dialect is not None and value not in DIALECTS[dialect].injectable:
            raise InputError(f"--inject {value}: not supported by {dialect}; expected --inject auto")
    return frozenset(injection for injection in supported if injection in values)


def umask_of(file_mode: int) -> int:
    """Return the umask for files of ``file_mode``; the owner can always enter folders."""
    return 0o677 & ~file_mode


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["read-log"]:
        log = read_log_parser().parse_args(argv[1:])
        from tap.logs.logtrace import read_log

        return read_log(log)
    settings = read_settings(argv)
    # Imported with the user's umask, so that other users can read compiled modules.
    import asyncio

    from tap.supervisor.service import serve
    from wire.loop import run

    os.umask(umask_of(settings.file_mode))  # also of the child processes
    try:
        run(serve(settings))
    except asyncio.CancelledError:  # SIGTERM or Ctrl-C before the start
        return 130
    return 0


def command() -> None:
    run_command("tap", main)


if __name__ == "__main__":
    command()
