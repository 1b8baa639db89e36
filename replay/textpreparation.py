"""Before a replay in words: the target's tokenizer is asked for words and template, and some prompts are proved."""

from dataclasses import dataclass
from itertools import islice

import numpy as np

from engines.control import ControlClient
from engines.vllm import VLLM
from loadgen.plan.preparation import find_tokenizer, path_of
from loadgen.text.chattemplate import order_of
from loadgen.text.prefixtruth import IDS, Examination, examine
from loadgen.text.spoken import chat_messages
from loadgen.text.targettext import NO_TARGET, TargetText, learn_target
from loadgen.text.tokenizer import Tokenizer, TokenizerError
from replay.capture import Survey, captured_of, read_kept
from replay.config import ReplayConfig
from replay.expansion import Expansion
from replay.text import TextTarget, open_text, orders, text_api_of, words_for

SAMPLED = 4
MOST_TURNS = 32
"""Of a session, for which the template is learnt before the run; a tokenizer on a disk learns more as they come."""


@dataclass(frozen=True, slots=True)
class PreparedReplayText:
    """What the shards get, and what was found out on the way."""

    target: TextTarget | None
    """Null: token ids are sent."""
    before: Examination


def prepare_replay_text(config: ReplayConfig, control: ControlClient, model: str, survey: Survey) -> PreparedReplayText:
    """Ask the tokenizer that ``--tokenizer`` names; of a replay in token ids, nothing has to be asked."""
    if config.api == "completions" or (config.api == "auto" and not any(map(text_api_of, survey.endpoints))):
        return PreparedReplayText(None, Examination(tokenizer=IDS))
    block_size = control.facts().engine.block_size
    try:
        tokenizer = find_tokenizer(config.tokenizer, control, model)
    except TokenizerError as error:
        unknown = Examination(unknown=str(error))
        return PreparedReplayText(TextTarget(config.api, NO_TARGET, block_size), unknown)
    turns = MOST_TURNS if config.replay_sessions else 1
    text = learn_target(tokenizer, orders(turns), path_of(config.tokenizer))
    target = TextTarget(config.api, text, block_size)
    return PreparedReplayText(target, examine_capture(tokenizer, target, config, survey))


def examine_capture(tokenizer: Tokenizer, target: TextTarget, config: ReplayConfig, survey: Survey) -> Examination:
    """Prove the prompts of the trace's first requests."""
    text = target.text
    if text.unknown is not None:
        return Examination(tokenizer=text.tokenizer, unknown=text.unknown)
    maker = open_text(TextTarget(target.api, TargetText(text.words, text.gaps)), VLLM, survey.block_size)
    expansion = Expansion(survey.block_size, config.nonce, maker.vocabulary(), config.cold_prompts)
    kept = (captured_of(record, 0.0, survey.block_size) for record in read_kept(survey, config.selection))
    sample = list(islice((each for each in kept if maker.form_of(each) is not None), SAMPLED))
    conversations = [maker.prompt(each, words_for(each, expansion)).conversation for each in sample]
    try:
        encoded = [np.asarray(tokenizer.encode_chat(chat_messages(each)), dtype=np.uint32) for each in conversations]
    except TokenizerError as error:
        return Examination(tokenizer=text.tokenizer, unknown=str(error))
    gaps = maker.speech.gaps(order_of(conversations[0])) if conversations else None
    return examine(
        [maker.speech.ids(each) for each in conversations],
        encoded,
        (0, 1) if len(conversations) > 1 else None,
        tokenizer=text.tokenizer,
        template_tokens=None if gaps is None else gaps.tokens,
    )
