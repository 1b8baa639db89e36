"""Text of a load before its run: the target's tokenizer asked, its words learnt, sampled prompts examined."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from engines.control import ControlClient
from loadgen.plan.config import LoadConfig
from loadgen.plan.opening import opening_of, orders_of
from loadgen.plan.shapes import SessionShape
from loadgen.plan.workload import Workload
from loadgen.text.enginetokenizer import find_tokenizer, path_of
from loadgen.text.messages import Piece, SyntheticMessage, VerbatimMessage
from loadgen.text.prefixtruth import GIVEN, IDS, Examination
from loadgen.text.spoken import SentMessage
from loadgen.text.targettext import NO_TARGET, TargetText, TextMaker, examine_conversations, learn_target
from loadgen.text.tokenizer import Tokenizer, TokenizerError
from loadgen.text.words import UNPROVEN
from tracefile import InputError

SAMPLED = 4
"""Sessions with proved prompts; more of the same shape would prove no more."""
SOUGHT = 200
"""Sessions searched for two of one prefix."""
MADE_UP_TOKENS = 24
"""Length of the answer that stands in a sampled second turn."""


@dataclass(frozen=True, slots=True)
class PreparedText:
    """Text data for the shards, and the findings on the way."""

    target: TargetText
    before: Examination


def prepare_text(
    source: str, control: ControlClient, model: str, sessions: Iterable[SessionShape], prefix_tokens: int
) -> PreparedText:
    first = list(islice(sessions, SOUGHT))
    try:
        tokenizer = find_tokenizer(source, control, model)
    except TokenizerError as error:
        return PreparedText(NO_TARGET, Examination(unknown=str(error)))
    target = learn_target(tokenizer, orders_of(first, prefix_tokens), path_of(source))
    return PreparedText(target, examine_sessions(tokenizer, target, first, prefix_tokens))


def prepare_load_text(config: LoadConfig, control: ControlClient, model: str) -> PreparedText:
    if config.sends_ids:
        return PreparedText(TargetText(UNPROVEN, {}, path=path_of(config.tokenizer)), Examination(tokenizer=IDS))
    prepared = prepare_text(config.tokenizer, control, model, Workload(config), config.prefix_tokens)
    unknown = prepared.before.unknown
    if config.chat_template and unknown == GIVEN and prepared.target.path is None:
        raise InputError("--chat-template: of a dataset's texts; expected the model's tokenizer, --tokenizer PATH")
    if config.chat_template and unknown not in (None, GIVEN):
        raise InputError(f"--chat-template: {unknown}; expected --tokenizer with a chat template")
    return prepared


def _has_texts(sessions: Iterable[SessionShape]) -> bool:
    return any(
        isinstance(said, VerbatimMessage) for session in sessions for turn in session.turns for said in turn.said
    )


def examine_sessions(
    tokenizer: Tokenizer, target: TargetText, sessions: Sequence[SessionShape], prefix_tokens: int
) -> Examination:
    if target.unknown is not None:
        return Examination(tokenizer=target.tokenizer, unknown=target.unknown)
    if _has_texts(sessions):
        return Examination(tokenizer=target.tokenizer, unknown=GIVEN)
    text_maker = TextMaker(target, tokenizer=tokenizer)
    sample, pair = _sample(sessions)
    conversations = [[text_maker.say(said) for said in opening_of(session, prefix_tokens)] for session in sample]
    later = [
        _continued(text_maker, conversation, session)
        for session, conversation in zip(sample, conversations, strict=True)
        if len(session.turns) > 1
    ]
    return examine_conversations(tokenizer, text_maker, [*conversations, *later], pair)


def _sample(sessions: Sequence[SessionShape]) -> tuple[list[SessionShape], tuple[int, int] | None]:
    """A few sessions, two of one prefix first if there are such; the places of these two."""
    of_prefix: dict[int, SessionShape] = {}
    for session in sessions:
        if session.prefix is None:
            continue
        other = of_prefix.setdefault(session.prefix, session)
        if other is not session:
            rest = [each for each in sessions if each is not other and each is not session]
            return [other, session, *rest[: SAMPLED - 2]], (0, 1)
    return list(sessions[:SAMPLED]), None


def _continued(text_maker: TextMaker, conversation: Sequence[SentMessage], session: SessionShape) -> list[SentMessage]:
    said = session.turns[1].messages()
    response = text_maker.say(SyntheticMessage("assistant", (Piece(session.turns[1].prompt_key + 1, MADE_UP_TOKENS),)))
    calls = tuple(call for message in said if (call := text_maker.call(message)) is not None)
    behind = SentMessage("assistant", response.text, response.numbers, length=response.length, calls=calls)
    return [*conversation, behind, *(text_maker.say(message) for message in said)]
