"""A synthetic load as a job: what its shards are told, and what each makes of its part."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

from engines.dialect import Dialect
from engines.vllm import VLLM
from loadgen.core.job import Shard
from loadgen.core.plan import Plan, Send
from loadgen.datasets import DATASETS
from loadgen.datasets.session import ESTIMATED, TokenizerLengths
from loadgen.plan.config import LoadConfig
from loadgen.plan.conversation import Conversations, StagedPlan
from loadgen.plan.opening import ChatOpening, TokenOpening
from loadgen.plan.shapes import SessionShape
from loadgen.plan.stages import waves
from loadgen.plan.workload import Survey, Workload
from loadgen.text.prompts import Prompt, TextForm, TokenForm
from loadgen.text.targettext import NO_TARGET, TargetText, TextMaker, open_text_maker
from tracefile import BlockHasher, HashKey, InputError, RequestId

ELSEWHERE = frozenset({"url", "trace", "model", "timeout_s", "overwrite", "as_json", "run", "dataset_path", "dialect"})
"""Of a config, what says nothing of the load itself."""
NAME_BYTES = 6
NOT_STARTED = "sessions_not_started"
"""Finding that counts sessions without room in time."""
ESTIMATED_LENGTHS = "estimated_lengths"
"""Finding that counts shards without exact lengths of a dataset's texts."""
FAR_ENOUGH = 10_000
"""So many sessions in a row of which an earlier part of the run knows nothing: it had not begun any later one."""


def load_name(config: LoadConfig) -> str:
    """A name for the load that equal loads have too: of its flags and, if it has one, of its dataset's bytes."""
    digest = hashlib.sha256()
    for each in fields(config):
        if each.name not in ELSEWHERE:
            digest.update(f"{each.name}={getattr(config, each.name)!r}\n".encode())
    if config.dataset_path is not None:
        digest.update(file_digest(config.dataset_path))
    return f"load-{digest.hexdigest()[: 2 * NAME_BYTES]}"


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file's bytes; raises InputError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a dataset") from None


def shard_of_cap(cap: int | None, shard: Shard) -> int | None:
    """A shard's part of a cap on the whole run; raises InputError where nothing is left for it."""
    if cap is None:
        return None
    part = cap // shard.count + (shard.index < cap % shard.count)
    if part == 0:
        raise InputError(f"--procs: {shard.count} with at most {cap} at once; expected at most {cap} processes")
    return part


def needs_lengths(config: LoadConfig) -> bool:
    """Return whether text lengths of the dataset matter: for output lengths, or for cutting turns."""
    if config.dataset_path is None or not DATASETS[config.dataset].has_texts:
        return False
    return config.output_tokens is None or DATASETS[config.dataset].cuts_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """A load for one engine."""

    config: LoadConfig
    model: str
    load_id: str
    """As ``load_name`` has it."""
    key: HashKey
    """Of the hashes and ids in the trace."""
    block_size: int
    """In which the trace's hashes are."""
    engine_block_size: int = 16
    """In which the engine caches, as far as it says."""
    dialect: Dialect = VLLM
    target: TargetText = NO_TARGET

    def open(self, shard: Shard) -> "OpenLoad":
        """Return the load of one shard. Raises InputError."""
        return OpenLoad(self, shard)

    def hasher(self) -> BlockHasher:
        return BlockHasher(self.key, block_size=self.block_size, model=self.model)

    def encodes(self) -> bool:
        """Return whether texts must be encoded during the run: a dataset's, or outputs whose ids the engine omits."""
        if self.config.dataset_path is not None and DATASETS[self.config.dataset].has_texts:
            return True
        if self.config.api == "completions":
            return self.config.chat_template and not self.dialect.returns_ids
        return self.config.api != "chat" or "return_token_ids" not in self.dialect.chat_fields("", 1, stream=True)

    def text(self) -> str:
        """Return the fingerprint of the words in the requests; empty: token ids are sent as drawn."""
        if self.config.api == "completions" and not self.config.chat_template:
            return ""
        return self.target.fingerprint(rendered=self.config.chat_template)

    def opening(self, text_maker: TextMaker, hasher: BlockHasher) -> Callable[[SessionShape], Prompt]:
        """Return the function that makes a session's first prompt."""
        config = self.config
        if config.api == "completions" and not config.chat_template:
            form = TokenForm(config.vocabulary, self.dialect, self.engine_block_size, text_maker, text_maker.truth)
            return TokenOpening(form, config.prefix_tokens, hasher)
        api = "chat" if config.api == "completions" else config.api
        form_of_text = TextForm(api, text_maker, self.dialect, self.engine_block_size, config.chat_template)
        return ChatOpening(form_of_text, config.prefix_tokens)


class OpenLoad:
    """Part of a load that one shard sends."""

    def __init__(self, job: LoadJob, shard: Shard) -> None:
        config, hasher = job.config, job.hasher()
        self._text_maker = open_text_maker(job.target, encodes=job.encodes())
        tokenizer = self._text_maker.tokenizer
        lengths = ESTIMATED if tokenizer is None else TokenizerLengths(tokenizer)
        self._sends: Iterator[Send] | None = None
        self._over = 0
        """Requests that an earlier part of the run has left nothing to do about."""
        self._estimated = int(tokenizer is None and needs_lengths(config))
        alone = not config.open_loop and config.single_turns and config.parallel_sessions is None
        width = None if alone else shard_of_cap(config.sessions_at_once, shard)
        self.load = Conversations(
            workload=Workload(config, shard, lengths, job.text()),
            model=job.model,
            open_prompt=job.opening(self._text_maker, hasher),
            hasher=hasher,
            key=job.key,
            load_id=job.load_id,
            width=width,
        )

    @cached_property
    def survey(self) -> Survey:
        return self.load.workload.survey()

    def plan(self) -> Plan:
        return self._ahead()

    def planned(self) -> int | None:
        self._ahead()
        planned = self.survey.planned
        return None if planned is None else planned - self._over

    def _ahead(self) -> Iterator[Send]:
        """Return the plan with its first send already made: a dataset may have to be read to its end for it."""
        if self._sends is None:
            sends = self._staged() if self.load.workload.config.pattern == "calibration" else self.load.plan()
            self._sends = chain(list(islice(sends, 1)), sends)
        return self._sends

    def _staged(self) -> Iterator[Send]:
        return iter(StagedPlan(self.load, waves(self.load.workload.config)).plan())

    def digest_share(self) -> int:
        return self.survey.digest_share

    def resume(self, ended: Mapping[RequestId, bool]) -> Collection[RequestId]:
        """Leave out sessions that have ended; return their requests."""
        over: dict[int, list[RequestId]] = {}
        for session, requests in self._begun(ended):
            whole = len(requests) == len(session.turns)
            if whole or not ended[requests[-1]]:
                over[session.index] = requests
                self._over += len(session.turns)
        self.load.over = over.keys()
        self._sends = None
        return [request for requests in over.values() for request in requests]

    def _begun(self, ended: Mapping[RequestId, bool]) -> Iterator[tuple[SessionShape, list[RequestId]]]:
        """Yield sessions that have known requests, with these requests; sessions began in order of their numbers."""
        unknown = 0
        for session in self.load.workload:
            ids = (self.load.request_id(session.index, turn) for turn in range(len(session.turns)))
            if known := [request for request in ids if request in ended]:
                unknown = 0
                yield session, known
            elif (unknown := unknown + 1) > FAR_ENOUGH:
                return

    def findings(self) -> dict[str, int]:
        counts = {NOT_STARTED: self.load.not_started, ESTIMATED_LENGTHS: self._estimated}
        return self._text_maker.truth.findings() | counts
