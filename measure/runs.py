"""Trace as columns: an array per field that a metric reads (tokens, latencies, status), in file order."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from measure.cache.chains import Chains
from measure.cache.reusable import PromptChains, reusable_tokens
from tracefile.files.digest import trace_digest
from tracefile.files.reading import open_trace
from tracefile.outputs import InferredOutputs, infer_outputs, inferred_outputs
from tracefile.records.arrays import BoolArray, FloatArray, IntArray
from tracefile.records.batches import Batch, without_collector
from tracefile.records.errors import InputError
from tracefile.records.schema import MOST_TOKENS, Meta, Record, Status

Int32Array = npt.NDArray[np.int32]

STATUSES: Final[tuple[Status, ...]] = ("ok", "error", "client_abort", "upstream_abort", "timeout")
UNKNOWN: Final = -1
"""Missing count in integer columns; 0 is a count."""


@dataclass(frozen=True, slots=True)
class Run:
    """Labelled trace as columns of n requests, in file order: tokens, latencies in ms. NaN: null in the trace."""

    label: str
    file: str
    """File name without its folder: pages do not reveal the folders of the machine."""
    digest: str
    meta: Meta
    request_ids: list[str]
    sessions: list[str | None]
    parents: list[str | None]
    turn: IntArray
    """Turn from 1; UNKNOWN: not recorded."""
    arrival_ms: FloatArray
    scheduled_ms: FloatArray
    held: BoolArray
    """True: the concurrency limit queued it."""
    cancelled: BoolArray
    """True: aborted at the planned end of the run."""
    ttft_ms: FloatArray
    e2e_ms: FloatArray
    status: npt.NDArray[np.int8]
    """Index into STATUSES."""
    streamed: BoolArray
    """False: recorded as not streamed."""
    prompt_tokens: IntArray
    planned_prompt_tokens: IntArray
    cached_tokens: IntArray
    """UNKNOWN: not reported; 0: a miss."""
    reusable_tokens: IntArray
    """Prefix hit in an unlimited cache, in tokens of full blocks; UNKNOWN: no hashes, or not requested."""
    output_tokens: IntArray
    max_tokens: IntArray
    concurrency: IntArray
    upstream: IntArray
    """Index into ``upstreams``; UNKNOWN: not recorded, or no upstream was reached."""
    gap_ms: FloatArray
    """Gap before each later read with tokens, request by request."""
    gap_tokens: Int32Array
    """Tokens of the read after each gap."""
    gap_owner: Int32Array
    """Row of each gap's request."""
    tpot_ms: FloatArray
    """TPOT by request: Σ gaps / Σ tokens after the first read. NaN: at most one read."""
    upstreams: tuple[str, ...] = ()
    """Names of the engines, by first occurrence."""
    warnings: tuple[str, ...] = ()
    chains: Chains | None = None
    """Chains of block hashes. Null: no hashes, or not requested."""

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def itl_ms(self) -> FloatArray:
        """ITL: each gap divided by the tokens of its read, in ms."""
        return self.gap_ms / self.gap_tokens if (self.gap_tokens > 1).any() else self.gap_ms

    @property
    def ok(self) -> BoolArray:
        return np.asarray(self.status == STATUSES.index("ok"))

    @property
    def end_ms(self) -> FloatArray:
        return self.arrival_ms + self.e2e_ms

    def without_gaps(self) -> "Run":
        """Return the run without the gaps between tokens, as in forecasts."""
        none = np.empty(0, np.int32)
        return replace(self, gap_ms=np.empty(0), gap_tokens=none, gap_owner=none)

    def select(self, rows: IntArray) -> "Run":
        """Return the requests at ``rows``, in this order."""
        new_row = np.full(len(self), UNKNOWN)
        new_row[rows] = np.arange(len(rows))
        gaps = new_row[self.gap_owner] != UNKNOWN
        columns: dict[str, Any] = {
            field.name: value[rows]
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), np.ndarray) and not field.name.startswith("gap_")
        }
        return replace(
            self,
            request_ids=[self.request_ids[row] for row in rows],
            sessions=[self.sessions[row] for row in rows],
            parents=[self.parents[row] for row in rows],
            gap_ms=self.gap_ms[gaps],
            gap_tokens=self.gap_tokens[gaps],
            gap_owner=new_row[self.gap_owner[gaps]].astype(np.int32),
            chains=None,
            **columns,
        )


_NUMBERS: Final = {
    "turn": "turn",
    "prompt_tokens": "prompt_tokens",
    "planned_prompt_tokens": "planned_prompt_tokens",
    "cached_tokens": "cached_tokens",
    "output_tokens": "output_tokens",
    "max_tokens": "max_tokens",
    "concurrency": "concurrency",
}
"""Record field of each column of counts."""
_TIMES: Final = ("arrival_ms", "scheduled_ms", "ttft_ms", "e2e_ms")
_WORDS: Final = {"request_ids": "request_id", "sessions": "session_id", "parents": "parent_id"}
AT_DEADLINE: Final = "deadline"
"""Error of a request that the planned end of the run cancelled."""
_STATUS_NUMBERS: Final[dict[str, int]] = {status: number for number, status in enumerate(STATUSES)}


@dataclass(slots=True)
class _Columns:
    """Columns collected batch by batch."""

    words: dict[str, list[str | None]] = field(default_factory=lambda: {name: [] for name in _WORDS})
    arrays: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    gap_ms: "array[float]" = field(default_factory=lambda: array("d"))
    """Gaps of all batches: most of a trace's memory, so the array grows in place."""
    upstreams: dict[str, int] = field(default_factory=dict)
    """Index of each upstream."""
    rows: int = 0

    def add(self, batch: Batch) -> None:
        for name, field_name in _WORDS.items():
            self.words[name].extend(batch.column(field_name))
        arrays: dict[str, npt.NDArray[Any]] = {
            **{name: batch.numbers(field_name, UNKNOWN) for name, field_name in _NUMBERS.items()},
            **{name: batch.times(name) for name in _TIMES},
            "status": np.array([_STATUS_NUMBERS.get(word or "ok", 0) for word in batch.column("status")], np.int8),
            "streamed": batch.numbers("stream", UNKNOWN) != 0,
            "held": batch.numbers("held") == 1,
            "scored": batch.numbers("prompt_logprobs") == 1,
            "cancelled": np.array([word == AT_DEADLINE for word in batch.column("error")], np.bool_),
        }
        indices = self.upstreams
        arrays["upstream"] = np.array(
            [indices.setdefault(word, len(indices)) if word else UNKNOWN for word in batch.column("upstream")], np.int64
        )
        gap_ms, gaps = _gaps(batch)
        self.gap_ms.frombytes(gap_ms.tobytes())
        arrays |= gaps
        for name, column in arrays.items():
            self.arrays.setdefault(name, []).append(column)
        self.rows += len(batch)

    def joined(self) -> dict[str, Any]:
        """Return the concatenated columns, and release the batches."""
        if not self.arrays:
            self.add(Batch([]))
        tokens, counts = self.arrays.pop("gap_tokens"), np.concatenate(self.arrays.pop("gap_counts"))
        single_tokens = all(batch.strides == (0,) for batch in tokens)
        return {
            **{name: np.concatenate(self.arrays.pop(name)) for name in list(self.arrays)},
            "gap_ms": np.frombuffer(self.gap_ms) if self.gap_ms else np.empty(0),
            "gap_tokens": np.broadcast_to(_SINGLE_TOKEN, len(self.gap_ms)) if single_tokens else np.concatenate(tokens),
            "gap_owner": np.repeat(np.arange(self.rows, dtype=np.int32), counts),
        }


_SINGLE_TOKEN: Final = np.ones(1, np.int32)


def _gaps(batch: Batch) -> tuple[FloatArray, dict[str, npt.NDArray[Any]]]:
    """Return all gaps between tokens, and columns by gap and by request; reads of one token need no memory."""
    gap_ms, tokens, counts = batch.values("itl_ms"), batch.values("itl_tokens"), batch.lengths("itl_ms")
    owner = np.repeat(np.arange(len(batch)), counts)
    token_counts = batch.lengths("itl_tokens")
    if (token_counts != counts).any():  # traces of other tools: a read without a count has one token
        tokens = _tokens_by_gap(tokens, token_counts, counts)
    gap_sums, token_sums = (np.bincount(owner, values, len(batch)) for values in (gap_ms, tokens))
    later = np.minimum(token_sums, MOST_TOKENS)
    later = np.where(later > 0, later, batch.numbers("output_tokens", 0) - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot_ms = np.where((counts > 0) & (later >= 1), gap_sums / later, np.nan)
    tokens = np.clip(tokens, 1, MOST_TOKENS).astype(np.int32)
    if tokens.max(initial=1) == 1:
        tokens = np.broadcast_to(_SINGLE_TOKEN, len(tokens))
    return gap_ms, {"gap_tokens": tokens, "gap_counts": counts, "tpot_ms": tpot_ms}


def _tokens_by_gap(tokens: FloatArray, token_counts: IntArray, counts: IntArray) -> FloatArray:
    """Return the tokens of each gap: 0 where the record has fewer token counts than gaps."""
    by_gap = np.zeros(int(counts.sum()))
    paired = np.minimum(token_counts, counts)
    within = np.arange(int(paired.sum())) - np.repeat(np.cumsum(paired) - paired, paired)
    by_gap[np.repeat(np.cumsum(counts) - counts, paired) + within] = tokens[
        np.repeat(np.cumsum(token_counts) - token_counts, paired) + within
    ]
    return by_gap


def load_run(label: str, path: Path, *, named: bool = True, reuse: bool = False, chains: bool = False) -> Run:
    """Read a trace into columns. Raises InputError if it is missing, malformed or empty.

    ``named``: with the digest, a second pass over the file. ``reuse``: with ``reusable_tokens``; ``chains``: also with
    chains of block hashes.
    """
    with open_trace(path) as reader, without_collector():
        inferred = inferred_outputs(reader) if reuse or chains else None
        run = _collect(label, path.name, reader.meta, reader.batches(), inferred, reuse=reuse, keeps_chains=chains)
        # The header at the end of a run has the complete workload.
        meta = msgspec.structs.replace(reader.meta, workload=reader.latest_meta.workload)
        warnings = tuple(reader.warnings)
    if not len(run):
        raise InputError(f"{path}: no records; expected at least one request")
    return replace(run, digest=trace_digest(path) if named else "", meta=meta, warnings=warnings)


def make_run(
    label: str, file: str, meta: Meta, records: Iterable[Record], *, reuse: bool = False, chains: bool = False
) -> Run:
    """Convert records to columns, without a digest; ``reuse`` and ``chains`` as in ``load_run``."""
    run_records = list(records)
    inferred = infer_outputs(meta, run_records) if reuse or chains else None
    return _collect(label, file, meta, [Batch(run_records)], inferred, reuse=reuse, keeps_chains=chains)


def _collect(
    label: str,
    file: str,
    meta: Meta,
    batches: Iterable[Batch],
    inferred: InferredOutputs | None,
    *,
    reuse: bool,
    keeps_chains: bool,
) -> Run:
    columns, prompt_chains = _Columns(), PromptChains(meta.block_size or 0, compiled=keeps_chains, inferred=inferred)
    reuse = (reuse or keeps_chains) and bool(meta.block_size)
    for batch in batches:
        columns.add(batch)
        if reuse:
            prompt_chains.add(batch)
    arrays = columns.joined()
    scored = arrays.pop("scored")
    reusable, chains = np.full(columns.rows, UNKNOWN), None
    if reuse and columns.rows:
        chains, end_ms = prompt_chains.pop_chains(), arrays["arrival_ms"] + arrays["e2e_ms"]
        reusable = reusable_tokens(chains, arrays["arrival_ms"], end_ms, arrays["prompt_tokens"], engine_block(meta))
        reusable = np.where(scored, np.minimum(reusable, 0), reusable)  # no prefix lookup for such prompts
    words: dict[str, Any] = columns.words
    keeps_chains = keeps_chains and chains is not None and len(chains.numbers) > 0
    return Run(
        label=label,
        file=file,
        digest="",
        meta=meta,
        upstreams=tuple(columns.upstreams),
        reusable_tokens=reusable,
        chains=chains if keeps_chains else None,
        **words,
        **arrays,
    )


def engine_block(meta: Meta) -> int:
    """Return the engine's block size if it is a multiple of the trace's, else the trace's."""
    fine, size = meta.block_size or 1, (meta.engine.block_size if meta.engine else None) or 0
    return size if size and size % fine == 0 else fine
