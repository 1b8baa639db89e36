"""Setups of the tap's processes, from the settings and the facts of the engine."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from engines.dialect import DialectName
from engines.facts import EngineFacts
from tap.ipc.exchange import RecorderSetup, WorkerSetup
from tap.ipc.workercounts import WorkerCounts
from tap.supervisor.config import NAMED_TOKENIZERS, TapConfig, checked_injection
from tracefile.hashing.blockhash import DEFAULT_BLOCK_SIZE, HashKey
from tracefile.records.errors import InputError
from tracefile.records.schema import HashInfo, Meta
from wire.url import Origin


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

    def map_counts(self, workers: int) -> WorkerCounts:
        return WorkerCounts(self.counts, workers)


SAME_NAMES = (
    *("trace", "overwrite", "resume", "rotate_bytes", "rotate_s", "upload", "sample"),
    *("tokenizer", "algorithm"),
)
"""Settings that the recorder's setup takes, by name."""


def recorder_setup(config: TapConfig, key: HashKey, facts: EngineFacts, runtime: Runtime) -> RecorderSetup:
    check_injection(config, facts)
    block_size = _block_size(config, facts)
    epoch_unix_ns, epoch_ns = time.time_ns(), time.perf_counter_ns()
    is_directory = config.tokenizer not in NAMED_TOKENIZERS
    meta = Meta(
        source="tap",
        model=config.model or facts.model,
        tokenizer=Path(config.tokenizer).resolve().name if is_directory else config.tokenizer,
        block_size=block_size,
        hash=HashInfo(algorithm=config.algorithm, key_id=key.key_id),
        epoch_unix_ns=epoch_unix_ns,
        engine=facts.known_engine,
    )
    return RecorderSetup(
        **{name: getattr(config, name) for name in SAME_NAMES},
        meta=meta,
        key_secret=key.secret,
        block_size=block_size,
        hash_model=config.model,
        loras=list(config.loras),
        epoch_ns=epoch_ns,
        socket=runtime.recorder_socket,
        keep_headers=list(config.keep_headers),
        inject=sorted(config.inject),
        dialect=dialect(config, facts),
        engine_url=str(facts.origin or config.upstreams[0]),
        admin_socket=None if config.admin is None else runtime.admin_socket,
    )


def worker_setup(
    config: TapConfig,
    facts: EngineFacts,
    runtime: Runtime,
    *,
    number: int,
    listen_fd: int,
    upstreams: tuple[Origin, ...],
) -> WorkerSetup:
    return WorkerSetup(
        number=number,
        workers=config.workers,
        listen_fd=listen_fd,
        upstreams=list(map(str, upstreams)),
        by_session=config.route == "session",
        counts_path=str(runtime.counts),
        recorder_socket=runtime.recorder_socket,
        admin_socket=None if config.admin is None else runtime.admin_socket,
        max_body_bytes=config.max_body_bytes,
        queue_bytes=config.queue_bytes // config.workers,
        keep_headers=list(config.keep_headers),
        inject=sorted(config.inject),
        dialect=dialect(config, facts),
        drain_s=config.drain_s,
    )


def dialect(config: TapConfig, facts: EngineFacts) -> DialectName:
    return config.dialect or facts.dialect or "vllm"


def check_injection(config: TapConfig, facts: EngineFacts) -> None:
    """Raise InputError if the engine cannot be asked for the injections, or is unknown."""
    spoken = config.dialect or facts.dialect
    if config.inject and spoken is None:
        raise InputError(
            "--inject: the upstream does not tell its engine, and some engines refuse unknown fields; "
            "expected --dialect"
        )
    checked_injection(sorted(config.inject), spoken)


def _block_size(config: TapConfig, facts: EngineFacts) -> int:
    engine_block = facts.engine.block_size
    block_size = config.block_size or min(DEFAULT_BLOCK_SIZE, engine_block or DEFAULT_BLOCK_SIZE)
    if engine_block and engine_block % block_size:
        print(
            f"tap: blocks of {block_size} tokens do not divide the engine's {engine_block}: "
            "hits cannot be counted exactly",
            file=sys.stderr,
        )
    return block_size
