"""One loadgen run from its config to its exit code."""

import sys
from pathlib import Path

import msgspec

from loadgen.config import LoadConfig
from loadgen.conversation import Conversations
from loadgen.draws import Vocabulary
from loadgen.driving import Drive, Driven, drive, origin_of
from loadgen.engine import ControlClient, EngineFacts
from loadgen.prompts import ChatOpening, TokenOpening
from loadgen.summary import Summary, summarize, summary_lines
from loadgen.workload import Workload, draw_workload
from tracefile import BlockHasher, InputError, Meta, load_key
from tracefile import Workload as WorkloadMeta

HASHED_BLOCK_SIZE = 16
INTERRUPTED = 130


def run_load(config: LoadConfig) -> int:
    """Send the load, write its trace, print its summary; 0, or 1 if nothing ended well, or 130 if cut short."""
    workload = draw_workload(config)
    digest = workload.digest()
    if workload.planned() == 0:
        raise InputError("--duration, --rate: no arrival in that time; expected a longer one or a higher rate")
    with ControlClient(str(origin_of(config.url))) as control:
        model = control.resolve_model(config.model)
        before = control.facts()
        load = open_load(workload, digest, model, before)
        driven = drive(
            load.plan(),
            Drive(
                url=config.url,
                trace=config.trace,
                meta=_meta(load, digest, before),
                planned=None if (planned := workload.planned()) is None else planned * config.turns,
                parallel=config.parallel,
                timeout_s=config.timeout_s,
                overwrite=config.overwrite,
            ),
        )
        if driven.stopped == "refused":
            raise InputError(refusal(control, model, config.vocabulary))
        notes = _notes(driven, config)
        summary = summarize_run(driven, config.pattern, digest, (before, control.facts()), notes)
    finish(summary, summary_lines(summary), config.summary)
    return exit_code(driven)


def open_load(workload: Workload, digest: str, model: str, facts: EngineFacts) -> Conversations:
    """The load, ready to be sent to an engine."""
    config = workload.config
    key = load_key()
    hasher = BlockHasher(
        key, block_size=min(HASHED_BLOCK_SIZE, facts.engine.block_size or HASHED_BLOCK_SIZE), model=model
    )
    tokens = TokenOpening(config.vocabulary, config.prefix_tokens, hasher)
    opening = tokens if config.api == "completions" else ChatOpening(config.prefix_tokens)
    return Conversations(workload, model, opening, hasher, key, f"load-{digest[:12]}")


def refusal(control: ControlClient, model: str, vocabulary: Vocabulary) -> str:
    """Why an engine refused every request so far, as far as asking it tells; its own words are never shown."""
    body = msgspec.json.encode({"model": model, "prompt": [vocabulary.low, vocabulary.high - 1], "max_tokens": 1})
    response = control.post("/v1/completions", body)
    if response.is_success:
        return (
            "--prompt-tokens, --output-tokens: the engine refuses these requests but takes a short one of the same "
            "vocabulary; expected lengths within its context"
        )
    plain = control.post("/v1/completions", msgspec.json.encode({"model": model, "prompt": [1], "max_tokens": 1}))
    if plain.is_success:
        return (
            f"--vocab-high: the engine refuses token ids of {vocabulary.low} … {vocabulary.high - 1} "
            f"(HTTP {response.status_code}); expected ids of its own vocabulary"
        )
    return (
        f"--url, --model: the engine refuses /v1/completions (HTTP {plain.status_code}); expected an engine serving it"
    )


def summarize_run(
    driven: Driven, pattern: str, digest: str, facts: tuple[EngineFacts, EngineFacts], notes: list[str]
) -> Summary:
    """The summary of a run that loadgen or replay drove."""
    return summarize(
        driven.tally,
        pattern=pattern,
        digest=digest,
        interrupted=driven.stopped,
        seconds=driven.seconds,
        cpu_s=driven.cpu_s,
        counters=(facts[0].counters, facts[1].counters),
        notes=notes,
    )


def finish(summary: msgspec.Struct, lines: list[str], path: Path | None) -> None:
    """Print a summary, and write it as JSON where asked."""
    print("\n".join(lines))
    if path is None:
        return
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    except OSError as error:
        print(f"warning: --json: {path}: cannot write ({error.strerror or error})", file=sys.stderr)


def exit_code(driven: Driven) -> int:
    """130 if cut short by Ctrl-C or SIGTERM, so that no script takes it for a whole run; 1 if nothing ended well."""
    if driven.stopped is not None:
        return INTERRUPTED
    return 0 if driven.tally.statuses["ok"] else 1


def _meta(load: Conversations, digest: str, facts: EngineFacts) -> Meta:
    config = load.workload.config
    counters = {} if facts.counters is None else {"prefix_counters_before": msgspec.to_builtins(facts.counters)}
    return Meta(
        source="client",
        model=load.model,
        tokenizer="ids" if config.api == "completions" else None,
        block_size=load.hasher.block_size,
        hash=load.hasher.info,
        engine=facts.engine,
        workload=WorkloadMeta(pattern=config.pattern, seed=config.seed, digest=digest, extra=_shape(config)),
        extra=counters,
    )


def _shape(config: LoadConfig) -> dict[str, object]:
    """The flags that made the load, to be read by people."""
    return {
        "api": config.api,
        "rate": config.rate,
        "duration_s": config.duration_s,
        "number": config.number,
        "parallel": config.parallel,
        "prompt_tokens": str(config.prompt_tokens),
        "output_tokens": str(config.output_tokens),
        "prefix_count": config.prefix_count,
        "prefix_tokens": config.prefix_tokens,
        "turns": config.turns,
        "think_s": str(config.think_s),
    }


def _notes(driven: Driven, config: LoadConfig) -> list[str]:
    unknown = driven.tally.without_output_hashes
    if config.api == "completions" and config.turns > 1 and unknown:
        return [
            f"the engine returned no token ids for {unknown} answers: the turns after them went on from stand-ins, "
            "whose blocks cannot be in its cache"
        ]
    return []
