"""Settings of the tap, validated once (a check returns its value or raises InputError), and setups of its processes."""

import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from engines.access import HEADER_NAME, SECRET_HEADER, Access
from engines.dialect import DialectName
from engines.facts import EngineFacts
from engines.recognition import DIALECTS
from engines.tokenizer import tokenizer_folder
from tap.ipc.exchange import BoardSize, CacheFeed, Certificate, Injection, RecorderSetup, UpstreamEntry, WorkerSetup
from tap.ipc.upstreamboard import UpstreamBoard
from tap.ipc.workercounts import WorkerCounts
from tap.prompts.promptstart import PIECE_TOKENS
from tap.proxy.livepolicy import live_policy
from tap.supervisor.upstreamlist import HealthCheck
from tracefile.commandline.parser import same_named
from tracefile.commandline.workers import usable_cores
from tracefile.files.reading import open_trace
from tracefile.hashing.blockhash import HashKey
from tracefile.records.errors import InputError
from tracefile.records.extras import load_extra
from tracefile.records.schema import HashAlgorithm, HashInfo, Meta
from tracefile.storage.output import refuse_inputs
from tracefile.storage.segments import path_under_key
from wire.errors import WireError
from wire.tls import server_context
from wire.url import Origin, parse_listen, parse_url

AUTO = "auto"
NAMED_TOKENIZERS = ("engine", "bytes", "ids")
LARGEST = 1 << 32
"""Of any number of a flag: so many GiB are counted in 64 bits."""
WORKERS_A_CORE = 16
"""More than that are a mistake in typing, and take the machine's memory from what else runs on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapConfig:
    """Settings of ``tap``."""

    upstreams: tuple[Origin, ...]
    draining: frozenset[Origin]
    stopped: frozenset[Origin]
    upstreams_file: Path | None
    route: str
    """Policy of ``engines.routing``, or a user's own: FILE.py:FUNCTION."""
    route_bytes: int
    """Bytes of a request's body that a policy may see, as hashes."""
    kv_events: tuple[tuple[Origin, str, str | None], ...]
    """Upstreams with addresses of their KV events and, if there is one, of the replay."""
    health_check: HealthCheck | None
    """Null: upstreams are judged by their connections and responses alone."""
    eject_after: int
    """Responses 5xx in a row after which an upstream gets no requests for a while. 0: never."""
    listen: tuple[str, int]
    certificate: Certificate | None
    """Certificate of the clients' port. Null: plain HTTP."""
    access: Access
    """Of the tap's own calls; its TLS of relayed requests, too."""
    workers: int
    trace: str
    rotate_bytes: int | None
    """Size at which a segment of the trace ends. Null: never."""
    rotate_s: float | None
    """Age at which a segment of the trace ends. Null: never."""
    keep_s: float | None
    """Age at which a closed segment is deleted. Null: never."""
    keep_bytes: int | None
    """Size of all closed segments beyond which the oldest are deleted. Null: never."""
    resume: bool
    overwrite: bool
    sample: float
    """Share of sessions to record, 0 < share ≤ 1."""
    keep_headers: tuple[str, ...]
    """Request headers that records keep, in lower case."""
    upload: str | None
    tokenizer: str
    """``engine``, ``ids``, ``bytes`` or a directory; ``auto``, until the engine is there: engine, or else bytes."""
    block_size: int | None
    """Null: 16, or the engine's if that is 8 to 15."""
    algorithm: HashAlgorithm
    key_file: Path | None
    model: str | None
    """Model name in place of the upstream's and the requests'. Null: theirs."""
    loras: tuple[str, ...]
    max_body_bytes: int
    queue_bytes: int
    inject: frozenset[Injection]
    inject_auto: bool
    """Each upstream is asked for the injections that its own dialect has."""
    dialect: DialectName | None
    """Null: by the engine's metrics, else vllm."""
    engine_facts: bool
    engine_metrics_s: float
    """Seconds between samples of the engine's metrics; 0: none."""
    admin: tuple[str, int] | None
    wait_s: float | None
    """Time for a first upstream to accept connections. Null: as long as it takes."""
    file_mode: int
    """Permissions of the files that are made."""
    admin_names: tuple[str, ...]
    """Host names for the admin port, besides those that no stranger can own."""
    drain_s: float
    log_interval_s: float
    """Between lines of the account; 0: none before the end."""


def checked_listen(flag: str, text: str) -> tuple[str, int]:
    try:
        return parse_listen(text)
    except WireError as error:
        raise InputError(f"{flag}: {error}") from None


def checked_certificate(cert: str | None, key: str | None) -> Certificate | None:
    if cert is None:
        if key is not None:
            raise InputError(f"--tls-key {key}: without --tls-cert; expected both, or neither")
        return None
    try:
        server_context(cert, key)
    except WireError as error:
        raise InputError(str(error)) from None
    return Certificate(cert, key)


def checked_tokenizer(text: str) -> str:
    if text in (AUTO, *NAMED_TOKENIZERS):
        return text
    return str(tokenizer_folder(Path(text), others=", `engine`, `bytes` or `ids`"))


def checked_trace(path: str, *, overwrite: bool, resume: bool, inputs: Sequence[Path]) -> str:
    refuse_inputs(path, inputs)
    if overwrite and resume:
        raise InputError("--overwrite, --resume: both were given; expected one of the two at most")
    if str(path).endswith(".parquet"):
        raise InputError(
            f"--output {path}: lines are recorded; expected .jsonl, for `tracefile convert` to put in columns"
        )
    found = Path(path)
    if found.is_dir():
        raise InputError(f"--output {path}: is a directory; expected a file to write")
    if found.is_file() and found.stat().st_size and not overwrite and not resume:
        raise InputError(f"--output {path}: already has a trace; expected a new file, --resume or --overwrite")
    if not os.access(found if found.exists() else found.parent, os.W_OK):
        raise InputError(f"--output {path}: cannot be written; expected a folder that is there and writable")
    return path


def trace_under(key: HashKey, trace: str) -> str:
    """Return the trace to go on with under a key: this one, or one named by the key if this is under another."""
    try:
        with open_trace(trace) as reader:
            told = reader.meta.hash
    except (InputError, OSError):  # none is there, or none that can be read
        return trace
    if told is None or told.key_id in (None, key.key_id):
        return trace
    return str(path_under_key(trace, key.key_id))


def checked_sample(share: float) -> float:
    if not 0 < share <= 1:
        raise InputError(f"--sample {share:g}: expected more than 0 and at most 1")
    return share


def checked_headers(names: Sequence[str]) -> tuple[str, ...]:
    """Names of headers that records may keep, in lower case; raises InputError for any that could hold a secret."""
    for name in names:
        if not HEADER_NAME.fullmatch(name):
            raise InputError(f"--keep-header {name}: expected the name of one header, such as X-Tenant")
        if SECRET_HEADER.search(name):
            raise InputError(f"--keep-header {name}: may hold a secret; expected a header that is none")
    return tuple(dict.fromkeys(name.lower() for name in names))


def checked_upload(url: str | None) -> str | None:
    if url is not None and not re.match(r"[a-z][a-z0-9+.-]*://", url):
        raise InputError(f"--upload {url}: expected a URL, such as s3://bucket/folder")
    return url


def check_rotation(args: Namespace) -> None:
    """Raise InputError for a flag about closed segments of a trace that has none."""
    if args.rotate_mb is not None or args.rotate_age is not None:
        return
    for flag, value in (("--upload", args.upload), ("--keep", args.keep), ("--keep-gb", args.keep_gb)):
        if value is not None:
            raise InputError(f"{flag}: about closed segments; expected --rotate-mb or --rotate-age beside it")


def checked_kv_events(
    texts: Sequence[str], upstreams: Sequence[Origin], route: str
) -> tuple[tuple[Origin, str, str | None], ...]:
    """Read ``UPSTREAM=tcp://HOST:PORT[,tcp://HOST:PORT]``, each for another upstream."""
    found: dict[Origin, tuple[Origin, str, str | None]] = {}
    for text in texts:
        url, _, addresses = text.rpartition("=")
        events, comma, replay = addresses.partition(",")
        try:
            upstream = parse_url(url).without_endpoint()
            for address in (events, replay) if comma else (events,):
                _check_zmq_address(address)
        except WireError as error:
            raise InputError(f"--kv-events {text}: {error}; UPSTREAM=tcp://HOST:PORT[,tcp://HOST:PORT]") from None
        if upstream not in upstreams or upstream in found:
            raise InputError(f"--kv-events {text}: expected each of the upstreams once at most")
        found[upstream] = (upstream, events, replay or None)
    if found and not live_policy(route).reads_prompt:
        raise InputError(f"--kv-events: --route {route} uses no caches; expected a policy that does, such as overlap")
    if found:
        load_extra("zmq", where="--kv-events: ")
    return tuple(found.values())


def _check_zmq_address(text: str) -> None:
    """Refuse what a subscriber cannot connect to. Raises WireError."""
    try:
        parts = urlsplit(text)
        named = parts.scheme == "tcp" and parts.hostname not in (None, "*") and parts.port and not parts.path
    except ValueError:
        named = False
    if not named:
        raise WireError(f"{text!r} is no address of ZeroMQ's: expected tcp://HOST:PORT")


def injection_words(texts: Sequence[str]) -> list[str]:
    return [word for text in texts for word in text.split(",")]


def checked_injection(words: Sequence[str], dialect: DialectName | None) -> frozenset[Injection]:
    known = get_args(Injection)
    wanted = injection_words(words)
    if AUTO in wanted and len(wanted) > 1:
        raise InputError("--inject auto: asks for all that the engine has; expected it alone")
    if AUTO in wanted:
        return frozenset(known)
    for word in wanted:
        if word not in known:
            raise InputError(f"--inject {word}: expected auto, {' or '.join(known)}")
    if wanted and dialect == "trtllm":
        raise InputError("--inject: TensorRT-LLM refuses fields that it does not know; expected another --dialect")
    if "token-ids" in wanted and dialect is not None and "token-ids" not in DIALECTS[dialect].injectable:
        raise InputError(f"--inject token-ids: {dialect} returns no token ids on OpenAI's endpoints; expected usage")
    return frozenset(injection for injection in known if injection in wanted)


def checked_mode(text: str) -> int:
    if not re.fullmatch("0?6[0-6][0-6]", text):
        raise InputError(f"--file-mode {text}: expected permissions that let the owner read and write, such as 0640")
    return int(text, 8)


def at_least(flag: str, value: float, least: float) -> None:
    if not value >= least:
        raise InputError(f"{flag} {value:g}: expected {least:g} or more")
    _at_most(flag, value)


def check_workers(workers: int) -> None:
    """Raise InputError unless so many processes are of use: each takes 50 MB, however few cores there are."""
    at_least("--workers", workers, 1)
    most = WORKERS_A_CORE * usable_cores()
    if workers > most:
        raise InputError(f"--workers {workers}: expected {most} at most, {WORKERS_A_CORE} for each core")


def more_than_zero(flag: str, value: float | None) -> None:
    if value is None:
        return
    if not value > 0:
        raise InputError(f"{flag} {value:g}: expected more than 0")
    _at_most(flag, value)


def _at_most(flag: str, value: float) -> None:
    if value > LARGEST:
        raise InputError(f"{flag} {value:g}: expected {LARGEST} at most")


@dataclass(frozen=True, slots=True)
class Runtime:
    """Sockets and files between the processes, in a folder that only its user can enter."""

    folder: Path

    @property
    def recorder_socket(self) -> str:
        return str(self.folder / "recorder.sock")

    @property
    def admin_socket(self) -> str:
        return str(self.folder / "admin.sock")

    @property
    def counts(self) -> Path:
        return self.folder / "counts"

    @property
    def board(self) -> Path:
        return self.folder / "upstreams"

    def map_counts(self, workers: int) -> WorkerCounts:
        return WorkerCounts(self.counts, workers)

    def map_board(self, size: BoardSize) -> UpstreamBoard:
        return UpstreamBoard(self.board, size)


def recorder_setup(config: TapConfig, key: HashKey, facts: EngineFacts, runtime: Runtime) -> RecorderSetup:
    check_injection(config, facts)
    if config.kv_events and config.tokenizer == "bytes":
        raise InputError("--kv-events: --tokenizer bytes has no token ids; expected engine, ids or a directory")
    if config.kv_events and config.model is None and facts.model is None:
        raise InputError("--kv-events: the engine does not tell the model's name; expected --model NAME")
    block_size = _block_size(config, facts)
    branches = facts.is_finer(block_size) and config.tokenizer != "bytes"
    epoch_unix_ns, epoch_ns = time.time_ns(), time.perf_counter_ns()
    is_directory = config.tokenizer not in NAMED_TOKENIZERS
    meta = Meta(
        source="tap",
        model=config.model or facts.model,
        tokenizer=Path(config.tokenizer).resolve().name if is_directory else config.tokenizer,
        block_size=block_size,
        hash=HashInfo(algorithm=config.algorithm, key_id=key.key_id, branches=branches or None),
        epoch_unix_ns=epoch_unix_ns,
        engine=facts.known_engine,
    )
    made = {
        "meta": meta,
        "key_secret": key.secret,
        "block_size": block_size,
        "branches": branches,
        "hash_model": config.model,
        "loras": list(config.loras),
        "epoch_ns": epoch_ns,
        "socket": runtime.recorder_socket,
        "keep_headers": list(config.keep_headers),
        "dialect": dialect(config, facts),
        "engine_url": str(facts.origin or config.upstreams[0]),
        "admin_socket": None if config.admin is None else runtime.admin_socket,
        "cache_feeds": [
            CacheFeed(str(upstream), config.upstreams.index(upstream), events, replay)
            for upstream, events, replay in config.kv_events
            if upstream in config.upstreams  # a reload may have removed it
        ],
        "board_path": str(runtime.board),
        "board": board_size(config, facts),
    }
    return RecorderSetup(**(same_named(RecorderSetup, config) | made))


def worker_setup(
    config: TapConfig,
    key: HashKey,
    facts: EngineFacts,
    runtime: Runtime,
    *,
    number: int,
    listen_fd: int,
    upstreams: list[UpstreamEntry],
    board: BoardSize,
) -> WorkerSetup:
    made = {
        "number": number,
        "listen_fd": listen_fd,
        "upstreams": upstreams,
        "capacity_blocks": cache_blocks(facts),
        "key_secret": key.secret,
        "loras": list(config.loras),
        "board_path": str(runtime.board),
        "board": board,
        "tls": config.access.tls,
        "counts_path": str(runtime.counts),
        "recorder_socket": runtime.recorder_socket,
        "admin_socket": None if config.admin is None else runtime.admin_socket,
        "queue_bytes": config.queue_bytes // config.workers,
        "keep_headers": list(config.keep_headers),
        "inject": sorted(config.inject),
    }
    return WorkerSetup(**(same_named(WorkerSetup, config) | made))


def cache_blocks(facts: EngineFacts) -> int:
    """Return the engine's KV cache in keys of prompts; 0: not known."""
    return int((facts.engine.num_gpu_blocks or 0) * (facts.engine.block_size or 0) / PIECE_TOKENS)


SPARE_SLOTS = 16
"""Room for upstreams of later reloads of ``--upstreams FILE``."""
MIN_KEYS, DEFAULT_KEYS, MAX_KEYS = 1 << 8, 1 << 14, 1 << 17


def board_size(config: TapConfig, facts: EngineFacts) -> BoardSize:
    """Return the size of the workers' shared memory: tables for as many tokens as the engine's cache."""
    slots = len(config.upstreams) + (0 if config.upstreams_file is None else SPARE_SLOTS)
    if slots == 1:  # no choice, now or later
        return BoardSize(config.workers, slots, 1)
    keys = cache_blocks(facts) or DEFAULT_KEYS
    return BoardSize(config.workers, slots, 1 << (min(max(keys, MIN_KEYS), MAX_KEYS) - 1).bit_length())


def dialect(config: TapConfig, facts: EngineFacts) -> DialectName:
    return config.dialect or facts.dialect or "vllm"


def check_injection(config: TapConfig, facts: EngineFacts) -> None:
    """Raise InputError if the engine cannot be asked for the injections, or is unknown."""
    spoken = config.dialect or facts.dialect
    if config.inject_auto:
        return
    if config.inject and spoken is None:
        raise InputError(
            "--inject: the upstream does not tell its engine, and some engines refuse unknown fields; "
            "expected --dialect, or --inject auto"
        )
    checked_injection(sorted(config.inject), spoken)
    if spoken == "sglang" and "token-ids" in config.inject and config.tokenizer == "ids":
        print(
            "tap: --inject token-ids: SGLang gives no ids with streamed chats, which are recorded without hashes; "
            "--tokenizer engine, or a path, hashes them",
            file=sys.stderr,
        )


def _block_size(config: TapConfig, facts: EngineFacts) -> int:
    """Return the block size of the hashes; print a note if the engine's hits cannot be counted in such blocks."""
    engine_block = facts.engine.block_size
    block_size = config.block_size or facts.hash_block_size
    if engine_block and engine_block % block_size and not facts.is_finer(block_size):
        print(
            f"tap: blocks of {block_size} tokens do not divide the engine's {engine_block}: "
            "hits cannot be counted exactly",
            file=sys.stderr,
        )
    return block_size
