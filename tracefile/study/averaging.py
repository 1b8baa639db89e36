"""``tracefile synthesize --mean-session``: a trace whose every session is the mean one, to see what averaging hides.

The rule of Applied Compute's article on agentic workloads, "mean trace ablation": every quantity is averaged over the
trace, whole numbers are rounded up, and that one session is sent as often as the trace has sessions. Here it keeps the
arrivals of the real sessions and the mean length of the prefix that they share.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tracefile.hashing.blockhash import invented_blocks
from tracefile.records.errors import InputError
from tracefile.records.schema import HashInfo, Meta, Record, RequestId, SessionId, Workload
from tracefile.study.cutting import session_name


@dataclass(frozen=True, slots=True)
class MeanSession:
    """Averages over a trace's sessions, in tokens and milliseconds."""

    turns: int
    input_prompt: int
    """First prompt of a session."""
    shared_blocks: int
    """Leading blocks of it that another session has, too."""
    response: int
    """Output of every turn but the last."""
    new_tokens: int
    """Of a later prompt, beyond the prompt and the output before."""
    think_ms: float
    final_response: int


@dataclass(slots=True)
class SessionMeans:
    """Sessions of a trace, taken record by record."""

    sessions: dict[str, list[Record]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        if record.prompt_tokens is not None and record.output_tokens:
            self.sessions.setdefault(session_name(record), []).append(record)

    def ordered(self) -> list[list[Record]]:
        """Sessions by first arrival, each in order of arrival; raises InputError if there are none."""
        if not self.sessions:
            raise InputError("no request has prompt_tokens and output_tokens; expected some to average")
        turns = [sorted(found, key=_order) for found in self.sessions.values()]
        return sorted(turns, key=lambda found: found[0].arrival_ms or 0.0)

    def mean(self) -> MeanSession:
        sessions = self.ordered()
        steps = [step for session in sessions for step in pairwise(session)]
        first_users = Counter(block for session in sessions for block in session[0].block_hashes or ())
        shared = [sum(first_users[block] > 1 for block in session[0].block_hashes or ()) for session in sessions]
        return MeanSession(
            turns=_up([len(session) for session in sessions]),
            input_prompt=_up([session[0].prompt_tokens or 0 for session in sessions]),
            shared_blocks=round(sum(shared) / len(shared)),
            response=_up([before.output_tokens or 0 for before, _ in steps]),
            new_tokens=_up([max(1, (after.prompt_tokens or 0) - before.context_tokens()) for before, after in steps]),
            think_ms=_mean([after.think_ms for _, after in steps if after.think_ms is not None]),
            final_response=_up([session[-1].output_tokens or 0 for session in sessions]),
        )


def mean_meta(meta: Meta, digest: str) -> Meta:
    """Return the header of a trace of mean sessions of the trace with this digest."""
    return Meta(
        model=meta.model,
        block_size=meta.block_size or 16,
        hash=HashInfo(algorithm="synthetic"),
        engine=meta.engine,
        workload=Workload(pattern="synthetic", source_digest=digest, extra={"mean_session": True}),
    )


def mean_records(mean: MeanSession, starts_ms: Sequence[float | None], block_size: int) -> Iterator[Record]:
    """Records of one mean session for each start; later turns have think times and no arrivals."""
    for number, start_ms in enumerate(starts_ms, start=1):
        context = 0
        for turn in range(1, mean.turns + 1):
            prompt = mean.input_prompt if turn == 1 else context + mean.new_tokens
            output = mean.final_response if turn == mean.turns else mean.response
            context = prompt + output
            yield Record(
                request_id=RequestId(f"mean-{number}.{turn}"),
                session_id=SessionId(f"mean-{number}"),
                session_source="explicit",
                parent_id=None if turn == 1 else RequestId(f"mean-{number}.{turn - 1}"),
                turn=turn,
                arrival_ms=start_ms if turn == 1 else None,
                think_ms=None if turn == 1 else mean.think_ms,
                prompt_tokens=prompt,
                output_tokens=output,
                tokens_source="estimate",
                block_hashes=invented_blocks(number, 0, prompt // block_size, mean.shared_blocks),
                output_block_hashes=invented_blocks(
                    number, prompt // block_size, (context - 1) // block_size, mean.shared_blocks
                ),
            )


def _order(record: Record) -> tuple[float, int]:
    return record.arrival_ms or 0.0, record.turn or 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _up(values: Sequence[int]) -> int:
    return math.ceil(_mean(values))
