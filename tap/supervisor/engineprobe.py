"""Questions to the engine at the tap's start, and lines about the tokenizer, its settings and its readiness."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engines.control import PAGE_TIMEOUT_S, ControlClient
from engines.dialect import DialectName
from engines.facts import EngineFacts
from engines.readiness import Readiness, readiness_notes, readiness_of, target_words
from engines.recognition import DIALECTS
from engines.tokenization import LOADING, tokenizer_problem
from tap.supervisor.config import AUTO, NAMED_TOKENIZERS, TapConfig, dialect
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine
from wire.url import Origin


@dataclass(frozen=True, slots=True)
class Probed:
    """Settings with the tokenizer that was found, and lines for the user."""

    config: TapConfig
    line: str
    notes: Sequence[str]


async def probe_engine(config: TapConfig, facts: EngineFacts, origin: Origin) -> Probed:
    """Ask one engine, in a thread of its own: some small calls, each with its time limit, none with a generation."""
    return await asyncio.to_thread(_probed, config, facts, origin)


def _probed(config: TapConfig, facts: EngineFacts, origin: Origin) -> Probed:
    known = config.dialect or facts.dialect
    found, why = Readiness(DIALECTS[known or "openai"]), ""
    with ControlClient(str(origin), config.access, timeout_s=PAGE_TIMEOUT_S) as control:
        if config.engine_facts:
            found = readiness_of(control, found.dialect, facts)
        if config.tokenizer == AUTO:
            tokenizer, why = _tokenizer(config, facts, control)
            config = replace(config, tokenizer=tokenizer)
    evidence = "" if known else "no evidence of another engine"
    words = [*target_words(str(origin), config.model or facts.model, facts, found, evidence)[1:]]
    words.append(f"tokenizer {config.tokenizer}{why}")
    if config.inject and known and (asked := config.inject & DIALECTS[known].injectable):
        words.append(f"asks for {' and '.join(sorted(asked))}")
    notes = [*readiness_notes(found), *([] if config.tokenizer != "bytes" or not why else [BYTES])]
    notes += _not_asked(config, known)
    return Probed(config, " · ".join(words), notes + _unknown(config, facts, known=known is not None))


BYTES = (
    "--tokenizer bytes: hashes of text show its shared prefixes in bytes, not in the engine's tokens; expected "
    "--tokenizer DIR, the model's own, for exact blocks"
)


COSTS: Mapping[str, str] = {
    "usage": "streams have no cached tokens and estimated lengths where clients do not ask for usage",
    "token-ids": "the blocks of an output are known from the next turn alone",
}


def _not_asked(config: TapConfig, known: DialectName | None) -> list[str]:
    """Return a note on what the engine could be asked for and is not, with what that costs."""
    if config.inject_auto and known is None:
        return [
            "--inject auto asks for nothing: no engine is recognised, and some refuse unknown fields; --dialect NAME"
        ]
    if config.inject_auto and known is not None and not DIALECTS[known].injectable:
        return [f"--inject auto asks for nothing: {known} refuses unknown fields"]
    askable = DIALECTS[known or "openai"].injectable - config.inject
    lacking = [injection for injection in COSTS if injection in askable]
    costs = "; ".join(COSTS[injection] for injection in lacking)
    return [f"no --inject {','.join(lacking)}: {costs}; expected --inject auto"] if lacking else []


def _tokenizer(config: TapConfig, facts: EngineFacts, control: ControlClient) -> tuple[str, str]:
    """Return the resumed trace's tokenizer, or else ``engine`` or ``bytes``; and the reason."""
    if config.resume and (before := _tokenizer_before(config.trace)) in NAMED_TOKENIZERS:
        return before, " (as before)"
    as_content = DIALECTS[dialect(config, facts)].tokenizes_content
    problem = tokenizer_problem(control, config.model or facts.model, as_content=as_content)
    if problem == LOADING and (config.dialect or facts.dialect):
        return "engine", " (still loading)"
    return ("engine", "") if problem is None else ("bytes", f" (the engine's {problem})")


def _tokenizer_before(trace: str) -> str:
    from tracefile.files.reading import open_trace  # noqa: PLC0415 - few resume without the flag

    with contextlib.suppress(InputError, OSError), open_trace(trace) as reader:
        return reader.meta.tokenizer or ""
    return ""


def _unknown(config: TapConfig, facts: EngineFacts, *, known: bool) -> list[str]:
    """Return a note on settings that the engine does not tell, with the flags that do."""
    engine = facts.engine
    flags = {
        "engine (--dialect NAME)": known,
        "model (--model NAME)": config.model or facts.model,
        "block size (--block-size TOKENS)": config.block_size or engine.block_size,
    } | _simulated(config.dialect or facts.dialect, engine)
    lacking = [flag for flag, value in flags.items() if not value]
    return [f"unknown: {', '.join(lacking)}"] if lacking else []


def _simulated(name: str | None, engine: Engine) -> dict[str, int | None]:
    """Return the settings that a simulation of this engine needs, by its flags; of another engine none."""
    known: dict[str, dict[str, int | None]] = {
        "vllm": {
            "cache size (sim: --num-gpu-blocks N)": engine.num_gpu_blocks,
            "step limits (sim: --max-num-seqs N, --max-num-batched-tokens N)": engine.max_num_seqs,
        },
        "sglang": {"cache size (sim: --kv-tokens N)": engine.extra.get("max_total_num_tokens")},
        "llamacpp": {"slots (sim: --slots N)": engine.max_num_seqs},
    }
    return known.get(name or "", {})
