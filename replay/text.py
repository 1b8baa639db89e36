"""A captured prompt as words, for chat, responses and messages APIs, in tokens of the target's tokenizer.

A block hash expands to ``block_size`` words of one token each, and a word has the position of its token in the prompt.
The chat template's tokens replace the first and last positions, so that length and blocks stay:

    captured   | block 1 | block 2 | … | block k | tail        |
    sent       template  | words of block 1 … k  | tail | template

All prompts share only the blocks within the start of the template. If the tail is shorter than the end of the template,
the prompt gets longer: a shared block is never cut. In a session, a prompt continues the previous prompt and its
generated output as messages; only the remaining tokens are words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from engines.dialect import Dialect
from loadgen.core.bodyfields import BodyFields
from loadgen.core.draws import TokenIds
from loadgen.core.job import Response
from loadgen.core.vocabulary import Vocabulary
from loadgen.text.api_messages import PATHS, SentMessage, TextApi, conversation_body
from loadgen.text.chattemplate import Order, order_of
from loadgen.text.prompts import ChatPrompt, TextForm
from loadgen.text.targettext import TargetText, TextMaker, open_text_maker
from replay.capture import Captured

EMPTY_MESSAGE = SentMessage("user", "", length=0)
FINDINGS = "text."
UNKNOWN_TO: Mapping[TextApi, frozenset[str]] = {
    "chat": frozenset(),
    "responses": frozenset({"n", "n_cmpl", "prompt_logprobs"}),
    "messages": frozenset({"n", "n_cmpl", "priority", "prompt_logprobs"}),
}
"""Captured request fields that an API does not have."""


@dataclass(frozen=True, slots=True)
class TextTarget:
    """Text settings of a shard: API, tokenizer and words, block size. Picklable."""

    api: TextApi | Literal["auto"]
    """``auto``: each request's captured API, if it takes messages."""
    text: TargetText
    engine_block_size: int | None = None


@dataclass(slots=True)
class TextCounts:
    """Counts of a replay in words: prompts with other token counts, blocks within the chat template."""

    longer: int = 0
    """Prompts whose tail is shorter than the end of the template."""
    longer_tokens: int = 0
    outgrown: int = 0
    """Prompts whose earlier messages alone have more tokens than the captured prompt."""
    template_blocks: int = 0
    """Leading blocks within the template, over all prompts."""
    continued: int = 0
    synthetic: int = 0
    """Prompts that continue an output in the capture but not in the replay."""

    def findings(self) -> dict[str, int]:
        return {FINDINGS + name: count for name, count in asdict(self).items()}


def text_counts(findings: Mapping[str, int]) -> TextCounts:
    counts = {name.removeprefix(FINDINGS): count for name, count in findings.items() if name.startswith(FINDINGS)}
    return TextCounts(**counts)


def text_lines(counts: TextCounts) -> list[str]:
    if not counts.continued and not counts.synthetic:
        return []
    return [f"real outputs        {counts.continued} prompts continue a generated output, {counts.synthetic} could not"]


def text_notes(counts: TextCounts) -> list[str]:
    notes = []
    if counts.longer:
        notes.append(
            f"{counts.longer} prompts are longer, {counts.longer_tokens} tokens in total: their tail is shorter than "
            "the end of the chat template"
        )
    if counts.outgrown:
        notes.append(
            f"{counts.outgrown} prompts are longer than captured: earlier outputs have more tokens as text than were "
            "generated (some engines repeat the prompt in the output)"
        )
    if counts.template_blocks:
        notes.append(f"{counts.template_blocks} leading blocks lie within the chat template: all prompts share them")
    return notes


@dataclass(slots=True)
class TextReplay:
    """Builds the text prompts of one shard for all turns, and counts token differences."""

    api: TextApi | Literal["auto"]
    text_maker: TextMaker
    forms: Mapping[TextApi, TextForm]
    block_size: int
    counts: TextCounts = field(default_factory=TextCounts)

    @property
    def name(self) -> str:
        return f"{self.api} {self.text_maker.target.fingerprint(with_ids=True)}"

    def form_of(self, captured: Captured) -> TextForm | None:
        api = text_api_of(captured.endpoint) if self.api == "auto" else self.api
        return None if api is None else self.forms[api]

    def findings(self) -> dict[str, int]:
        return self.counts.findings() | self.text_maker.counts.findings()

    def body(
        self,
        prompt: ChatPrompt,
        model: str,
        tokens: int,
        *,
        stream: bool,
        shape: Mapping[str, object],
        fields: BodyFields,
    ) -> bytes:
        """Body with the captured fields that the API has."""
        api = prompt.form.api
        extra = {name: value for name, value in shape.items() if name not in UNKNOWN_TO[api]} | fields.patch()
        return conversation_body(
            api, model, prompt.conversation, tokens, stream=stream, extra=extra, dialect=prompt.form.dialect
        )

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(0, len(self.text_maker.target.words.texts))

    def prompt(self, captured: Captured, numbers: TokenIds, before: "Exchange | None" = None) -> ChatPrompt:
        form = self.form_of(captured)
        assert form is not None  # sent as text
        if before is not None:
            prompt = self._continue(captured, numbers, before) if before.prompt.form is form else None
            self.counts.continued += prompt is not None
            self.counts.synthetic += prompt is None
            if prompt is not None:
                return prompt
        fitted = self._fit(captured, numbers, [EMPTY_MESSAGE])
        if fitted is None:
            # Unknown template: one word a token, without exact lengths.
            return ChatPrompt(form, [self._user(numbers)])
        self.counts.template_blocks += min(fitted.start // self.block_size, len(captured.hashes))
        return ChatPrompt(form, [self._user(fitted.numbers)])

    def _continue(self, captured: Captured, numbers: TokenIds, before: "Exchange") -> ChatPrompt | None:
        """Continue a generated output; null: the capture did not, or token counts are unknown."""
        if not continues(captured, before.captured):
            return None
        output = before.prompt.answered(before.response)
        fitted = self._fit(captured, numbers, [*before.prompt.conversation, output, EMPTY_MESSAGE])
        return None if fitted is None else before.prompt.continued(before.response, [self._user(fitted.numbers)])

    def _fit(self, captured: Captured, numbers: TokenIds, conversation: Sequence[SentMessage]) -> "Fitted | None":
        """Choose the words of the last message so that block positions stay; null: token counts unknown."""
        gaps = self.text_maker.gaps(order_of(conversation))
        start = self.text_maker.length(conversation, len(conversation) - 1)
        if gaps is None or start is None:
            return None
        ending = len(gaps.ids[-1])
        block_tokens = len(captured.hashes) * self.block_size
        words = numbers[start : max(len(numbers) - ending, min(block_tokens, len(numbers)))]
        if not len(words):  # the template alone is as long as the prompt was
            words = numbers[-1:]
        longer = start + len(words) + ending - len(numbers)
        if start > len(numbers) and len(conversation) > 1:
            self.counts.outgrown += 1
        else:
            self.counts.longer += longer > 0
            self.counts.longer_tokens += longer
        return Fitted(start, words)

    def _user(self, numbers: TokenIds) -> SentMessage:
        return self.text_maker.message("user", numbers)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Words of a message, and the number of tokens before it."""

    start: int
    numbers: TokenIds


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt with its response, for prompts that continue it."""

    captured: Captured
    prompt: ChatPrompt
    response: Response


def continues(captured: Captured, before: Captured) -> bool:
    """True if a captured prompt starts with all blocks of ``before``, output blocks included."""
    cached = [*before.hashes, *(before.output_hashes or ())]
    return len(captured.hashes) >= len(cached) > 0 and list(captured.hashes[: len(cached)]) == cached


def open_text(target: TextTarget, dialect: Dialect, block_size: int) -> TextReplay:
    text_maker = open_text_maker(target.text)
    engine_block = target.engine_block_size or block_size
    forms = {api: TextForm(api, text_maker, dialect, engine_block) for api in PATHS}
    return TextReplay(target.api, text_maker, forms, block_size)


def text_api_of(endpoint: str | None) -> TextApi | None:
    return next((api for api, path in PATHS.items() if path == endpoint), None)


def orders(turns: int) -> list[Order]:
    return [("user", *("assistant", "user") * before) for before in range(turns)]
