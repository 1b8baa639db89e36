"""Start of the tap: engine probes, start line and notes, and the setup messages of recorder and workers."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from engines.control import PAGE_TIMEOUT_S, ControlClient
from engines.detection import DIALECTS, Recognised
from engines.dialect import DialectName
from engines.facts import EngineFacts
from engines.readiness import Target, probe_cache
from engines.tokenization import LOADING, tokenizer_problem
from tap.ipc.messages import RecorderSetup, WorkerSetup
from tap.ipc.settings import AUTO, NAMED_TOKENIZERS, Settings
from tap.ipc.sharedmemory import BoardSize
from tracefile.files.reading import open_trace
from tracefile.hashing.blockhash import HashKey
from tracefile.records.errors import InputError
from tracefile.records.schema import HashInfo, Meta
from wire.url import Origin

KEY_TOKENS = 128
"""Tokens per prefix block key: ``BLOCK_TOKENS`` of ``tap.proxy.routing``."""


async def probe_engine(settings: Settings, facts: EngineFacts, origin: Origin) -> tuple[Settings, str, Sequence[str]]:
    """Return the settings with the tokenizer resolved, the start line about the engine, and notes.

    Sends some small control calls in a thread, each with a timeout; none generates tokens.
    """
    return await asyncio.to_thread(_probed, settings, facts, origin)


def _probed(settings: Settings, facts: EngineFacts, origin: Origin) -> tuple[Settings, str, Sequence[str]]:
    dialect = settings.dialect or facts.dialect
    recognised = Recognised(DIALECTS[dialect or "openai"], "" if dialect else "no evidence of another engine")
    target, reason = Target(str(origin), settings.model or facts.model, recognised, facts), ""
    with ControlClient(str(origin), settings.access, timeout_s=PAGE_TIMEOUT_S) as control:
        if settings.engine_facts:
            target = probe_cache(control, target)
        if settings.tokenizer == AUTO:
            tokenizer, reason = _tokenizer(settings, facts, control)
            settings = msgspec.structs.replace(settings, tokenizer=tokenizer)
    parts = [*target.words()[1:], f"tokenizer {settings.tokenizer}{reason}"]
    if settings.inject and dialect and (injected := settings.inject & DIALECTS[dialect].injectable):
        parts.append(f"injects {' and '.join(sorted(injected))}")
    is_without = settings.tokenizer == "ids" and reason and not settings.inject_auto
    notes = [] if not settings.engine_facts else [*target.load_notes(), *target.cache_notes()]
    notes += [WITHOUT_TOKENIZER] if is_without else []
    return settings, " · ".join(parts), notes + _injection_notes(settings, dialect)


WITHOUT_TOKENIZER = (
    "--tokenizer ids: text prompts have block hashes only if the response has their token ids; expected --tokenizer "
    "DIR with the model's tokenizer, or --inject auto"
)
COSTS: Mapping[str, str] = {
    "usage": "streams without client-requested usage have no cached tokens, and estimated output tokens",
    "token-ids": "output blocks are known only from the next turn",
}


def _injection_notes(settings: Settings, dialect: DialectName | None) -> list[str]:
    """Return a note on supported injections that are off, with the effect on the trace."""
    supported = DIALECTS[dialect or "openai"].injectable
    if settings.inject_auto and (dialect is None or not supported):
        reason = "engine not detected; expected --dialect NAME" if dialect is None else f"not supported by {dialect}"
        return [f"--inject auto injects nothing: {reason}"]
    missing = [injection for injection in COSTS if injection in supported - settings.inject]
    costs = "; ".join(COSTS[injection] for injection in missing)
    return [f"no --inject {','.join(missing)}: {costs}; expected --inject auto"] if missing else []


def _tokenizer(settings: Settings, facts: EngineFacts, control: ControlClient) -> tuple[str, str]:
    """Return the tokenizer of the resumed trace, else ``engine`` or ``ids``, with the reason."""
    if settings.resume and (earlier_tokenizer := _tokenizer_before(settings.trace)) in NAMED_TOKENIZERS:
        return earlier_tokenizer, " (as before)"
    as_content = DIALECTS[spoken_dialect(settings, facts)].tokenizes_content
    problem = tokenizer_problem(control, settings.model or facts.model, as_content=as_content)
    if problem == LOADING and (settings.dialect or facts.dialect):
        return "engine", " (still loading)"
    return ("engine", "") if problem is None else ("ids", f" (the engine's {problem})")


def _tokenizer_before(trace: str) -> str:
    with contextlib.suppress(InputError, OSError), open_trace(trace) as reader:
        return reader.meta.tokenizer or ""
    return ""


def spoken_dialect(settings: Settings, facts: EngineFacts) -> DialectName:
    return settings.dialect or facts.dialect or "vllm"


def recorder_setup(settings: Settings, key: HashKey, facts: EngineFacts, socket: str) -> RecorderSetup:
    check_injection(settings, facts)
    block_size = _block_size(settings, facts)
    branches = facts.is_finer(block_size)
    is_directory = settings.tokenizer not in NAMED_TOKENIZERS
    epoch_unix_ns, epoch_ns = time.time_ns(), time.perf_counter_ns()
    meta = Meta(
        source="tap",
        model=settings.model or facts.model,
        tokenizer=Path(settings.tokenizer).resolve().name if is_directory else settings.tokenizer,
        block_size=block_size,
        hash=HashInfo(algorithm=settings.algorithm, key_id=key.key_id, branches=branches or None),
        epoch_unix_ns=epoch_unix_ns,
        engine=facts.reported_engine,
    )
    return RecorderSetup(
        settings=settings,
        socket=socket,
        meta=meta,
        key_secret=key.secret,
        dialect=spoken_dialect(settings, facts),
        engine_url=str(facts.origin or settings.upstreams[0]),
        epoch_ns=epoch_ns,
    )


SPARE_SLOTS = 16
"""Spare slots for upstreams of later reloads of ``--upstreams FILE``."""
MIN_KEYS, DEFAULT_KEYS, MAX_KEYS = 1 << 8, 1 << 14, 1 << 17


def worker_setup(settings: Settings, key: HashKey, facts: EngineFacts, folder: str) -> WorkerSetup:
    """Return the setup of the first worker; prefix tables have the size of the engine's KV cache in tokens."""
    capacity = int((facts.engine.num_gpu_blocks or 0) * (facts.engine.block_size or 0) / KEY_TOKENS)
    slots = len(settings.upstreams) + (0 if settings.upstreams_file is None else SPARE_SLOTS)
    keys = 1 << (min(max(capacity or DEFAULT_KEYS, MIN_KEYS), MAX_KEYS) - 1).bit_length()
    return WorkerSetup(
        settings=settings,
        folder=folder,
        number=0,
        listen_fd=-1,
        upstreams=[],
        capacity_blocks=capacity,
        key_secret=key.secret,
        board=BoardSize(settings.workers, slots, keys if slots > 1 else 1),  # a single upstream needs no routing
    )


def check_injection(settings: Settings, facts: EngineFacts) -> None:
    """Raise InputError if the engine does not support the injections, or is unknown."""
    dialect = settings.dialect or facts.dialect
    if settings.inject_auto or not settings.inject:
        return
    if dialect is None:
        raise InputError(
            "--inject: engine not detected, and some engines refuse unknown fields; "
            "expected --dialect, or --inject auto"
        )
    if refused := settings.inject - DIALECTS[dialect].injectable:
        parts = ",".join(sorted(refused))
        raise InputError(f"--inject {parts}: not supported by {dialect}; expected --inject auto")


def _block_size(settings: Settings, facts: EngineFacts) -> int:
    """Return the block size of the hashes; print a note if prefix hits cannot be counted in such blocks."""
    engine_block = facts.engine.block_size
    block_size = settings.block_size or facts.hash_block_size
    if engine_block and engine_block % block_size and not facts.is_finer(block_size):
        print(
            f"tap: blocks of {block_size} tokens do not divide the engine's {engine_block}: "
            "prefix hits cannot be counted exactly",
            file=sys.stderr,
        )
    return block_size
