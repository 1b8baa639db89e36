"""A replay as a job: what crosses to the processes of a run, and what each of them makes of its part."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engines.dialect import DialectName
from engines.recognition import DIALECTS
from loadgen.core.job import Shard
from loadgen.core.plan import Plan
from replay.capture import load_requests
from replay.config import ReplayConfig
from replay.rounds import Replay, link_requests, make_replay
from replay.sending import Replayed, plan_sends, roots_of
from replay.survey import Survey
from replay.text import TextTarget, open_text
from tracefile import RequestId


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """A replay that any process can open: the requests themselves are read there."""

    config: ReplayConfig
    survey: Survey
    model: str
    dialect: DialectName
    text: TextTarget | None = None
    """What is known of the target's text; null: token ids are sent."""

    def open(self, shard: Shard) -> "OpenReplay":
        """Read the shard's sessions from the trace. Raises InputError."""
        config = self.config
        requests = load_requests(
            self.survey,
            config.selection,
            shard=shard,
            sessions=config.replay_sessions,
            output_substitution=config.output_substitution and not config.cold_prompts,
        )
        replay = make_replay(
            config,
            self.model,
            requests,
            link_requests(requests) if config.replay_sessions else {},
            self.survey.block_size,
            dialect=DIALECTS[self.dialect],
            width=slots_of(config, shard),
            period_ms=self.survey.span_ms,
            text=None if self.text is None else open_text(self.text, DIALECTS[self.dialect], self.survey.block_size),
        )
        return OpenReplay(replay)


@dataclass(slots=True)
class OpenReplay:
    """A shard's part of a replay, ready to be sent."""

    replay: Replay
    _left: int | None = None
    """Requests to be sent once some are known to be over; null: all."""

    def plan(self) -> Plan:
        return plan_sends(self.replay)

    def planned(self) -> int:
        whole = len(self.replay.requests) * self.replay.config.repeat
        return whole if self._left is None else self._left

    def digest_share(self) -> int:
        return self.replay.digest_share()

    def resume(self, ended: Mapping[RequestId, bool]) -> Collection[RequestId]:
        """Leave out roots that have ended with all their followers, up to the first failure."""
        replay = self.replay
        kept: set[RequestId] = set()
        gone = 0
        for root in list(roots_of(replay)):
            sent = sent_to_the_end(replay, root, ended)
            if not sent:
                continue
            replay.over.add((root.round.number, root.captured.request_id))
            kept.update(sent)
            tree = 1 + sum(1 for _ in replay.behind(root.captured))
            replay.fidelity.leave(tree - len(sent), "a failure in the earlier run")
            gone += tree
        self._left = self.planned() - gone
        return kept

    def findings(self) -> dict[str, int]:
        fidelity = self.replay.fidelity
        fidelity.substituted_blocks = sum(each.substitution.substituted_blocks for each in self.replay.rounds.values())
        fidelity.missed_blocks = sum(each.substitution.missed_blocks for each in self.replay.rounds.values())
        links = self.replay.links.values()
        text = {} if self.replay.text is None else self.replay.text.findings()
        return fidelity.findings() | text | {FOLLOWERS: sum(link.anchor is not None for link in links)}


FOLLOWERS = "followers"
"""Among the findings: requests that waited for another one's end."""


def slots_of(config: ReplayConfig, shard: Shard) -> int | None:
    """Return the number of sessions a closed loop has open in a shard; null: not a closed loop of sessions."""
    if not config.closed_loop or not config.replay_sessions or config.parallel is None:
        return None
    return len(range(shard.index, config.parallel, shard.count))


def sent_to_the_end(replay: Replay, root: Replayed, ended: Mapping[RequestId, bool]) -> list[RequestId]:
    """Return the requests of a root's tree that were sent, if none is left to send; else nothing."""
    sent: list[RequestId] = []
    waiting = [root.captured]
    while waiting:
        captured = waiting.pop()
        request_id = root.round.request_id(captured.request_id)
        well = ended.get(request_id)
        if well is None:
            return []
        sent.append(request_id)
        if well:
            waiting += replay.followers.get(captured.request_id, ())
    return sent
