"""The tap's start: questions to the engine, lines about it for the user, and the setups that follow from its facts."""

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
from engines.readiness import Target, with_cache
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
"""Tokens that a key of a prompt's start stands for, by the estimate of ``tap.proxy.promptkeys``."""


async def probe_engine(settings: Settings, facts: EngineFacts, origin: Origin) -> tuple[Settings, str, Sequence[str]]:
    """Return the settings with a tokenizer, a line about the engine, and notes.

    Some small calls in a thread of their own, each with its time limit, none with a generation.
    """
    return await asyncio.to_thread(_probed, settings, facts, origin)


def _probed(settings: Settings, facts: EngineFacts, origin: Origin) -> tuple[Settings, str, Sequence[str]]:
    known = settings.dialect or facts.dialect
    found = Recognised(DIALECTS[known or "openai"], "" if known else "no evidence of another engine")
    target, why = Target(str(origin), settings.model or facts.model, found, facts), ""
    with ControlClient(str(origin), settings.access, timeout_s=PAGE_TIMEOUT_S) as control:
        if settings.engine_facts:
            target = with_cache(control, target)
        if settings.tokenizer == AUTO:
            tokenizer, why = _tokenizer(settings, facts, control)
            settings = msgspec.structs.replace(settings, tokenizer=tokenizer)
    words = [*target.words()[1:], f"tokenizer {settings.tokenizer}{why}"]
    if settings.inject and known and (asked := settings.inject & DIALECTS[known].injectable):
        words.append(f"asks for {' and '.join(sorted(asked))}")
    is_without = settings.tokenizer == "ids" and why and not settings.inject_auto
    notes = [] if not settings.engine_facts else [*target.load_notes(), *target.cache_notes()]
    notes += [WITHOUT_TOKENIZER] if is_without else []
    return settings, " · ".join(words), notes + _not_asked(settings, known)


WITHOUT_TOKENIZER = (
    "--tokenizer ids: prompts sent as text have hashes only where the response holds their ids; expected --tokenizer "
    "DIR, the model's own, or --inject auto"
)
COSTS: Mapping[str, str] = {
    "usage": "streams have no cached tokens and estimated lengths where clients do not ask for usage",
    "token-ids": "the blocks of an output are known from the next turn alone",
}


def _not_asked(settings: Settings, known: DialectName | None) -> list[str]:
    """Return a note on what the engine could be asked for and is not, with what that costs."""
    askable = DIALECTS[known or "openai"].injectable
    if settings.inject_auto and (known is None or not askable):
        reason = "no engine is recognised; --dialect NAME" if known is None else f"{known} refuses unknown fields"
        return [f"--inject auto asks for nothing: {reason}"]
    lacking = [injection for injection in COSTS if injection in askable - settings.inject]
    costs = "; ".join(COSTS[injection] for injection in lacking)
    return [f"no --inject {','.join(lacking)}: {costs}; expected --inject auto"] if lacking else []


def _tokenizer(settings: Settings, facts: EngineFacts, control: ControlClient) -> tuple[str, str]:
    """Return the resumed trace's tokenizer, or else ``engine`` or ``ids``; and the reason."""
    if settings.resume and (before := _tokenizer_before(settings.trace)) in NAMED_TOKENIZERS:
        return before, " (as before)"
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
        engine=facts.known_engine,
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
"""Room for upstreams of later reloads of ``--upstreams FILE``."""
MIN_KEYS, DEFAULT_KEYS, MAX_KEYS = 1 << 8, 1 << 14, 1 << 17


def worker_setup(settings: Settings, key: HashKey, facts: EngineFacts, folder: str) -> WorkerSetup:
    """Return the setup of the first worker; upstreams' tables are for as many tokens as the engine's cache."""
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
        board=BoardSize(settings.workers, slots, keys if slots > 1 else 1),  # one upstream is no choice
    )


def check_injection(settings: Settings, facts: EngineFacts) -> None:
    """Raise InputError if the engine cannot be asked for the injections, or is unknown."""
    spoken = settings.dialect or facts.dialect
    if settings.inject_auto or not settings.inject:
        return
    if spoken is None:
        raise InputError(
            "--inject: the upstream does not tell its engine, and some engines refuse unknown fields; "
            "expected --dialect, or --inject auto"
        )
    if refused := settings.inject - DIALECTS[spoken].injectable:
        words = ",".join(sorted(refused))
        raise InputError(f"--inject {words}: {spoken} refuses it, or returns none; expected --inject auto")


def _block_size(settings: Settings, facts: EngineFacts) -> int:
    """Return the block size of the hashes; print a note if the engine's hits cannot be counted in such blocks."""
    engine_block = facts.engine.block_size
    block_size = settings.block_size or facts.hash_block_size
    if engine_block and engine_block % block_size and not facts.is_finer(block_size):
        print(
            f"tap: blocks of {block_size} tokens do not divide the engine's {engine_block}: "
            "hits cannot be counted exactly",
            file=sys.stderr,
        )
    return block_size
