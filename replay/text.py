"""A captured prompt as words: for the APIs that take conversations, in the target's own tokens.

A hash stands for ``block_size`` words of one token each, and a word keeps the place in the prompt that its token had.
The chat template's tokens take the first and last places, so that length and blocks stay:

    captured   | block 1 | block 2 | … | block k | tail        |
    sent       template  | words of block 1 … k  | tail | template

Only blocks within the template's beginning are shared by all prompts. If the tail has no room for the template's end,
the prompt is longer: a shared block is never cut. In a session a prompt continues the last one and its real output,
as messages, and only the rest is words.
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
"""Fields of a captured shape that an API does not have."""


@dataclass(frozen=True, slots=True)
class TextTarget:
    """Text settings of a shard; plain values."""

    api: TextApi | Literal["auto"]
    """``auto``: each request's own API, if it takes conversations."""
    text: TargetText
    engine_block_size: int | None = None


@dataclass(slots=True)
class TextCounts:
    """Counts of the captured blocks in a replay of words."""

    longer: int = 0
    """Prompts without room for the template's end in their tail."""
    longer_tokens: int = 0
    outgrown: int = 0
    """Prompts whose earlier messages alone are longer than the capture's prompt."""
    template_blocks: int = 0
    """Leading blocks within the template, of all prompts."""
    continued: int = 0
    made_up: int = 0
    """Prompts that could not, unlike the capture."""

    def findings(self) -> dict[str, int]:
        return {FINDINGS + name: count for name, count in asdict(self).items()}


def text_counts(findings: Mapping[str, int]) -> TextCounts:
    found = {name.removeprefix(FINDINGS): count for name, count in findings.items() if name.startswith(FINDINGS)}
    return TextCounts(**found)


def text_lines(counts: TextCounts) -> list[str]:
    if not counts.continued and not counts.made_up:
        return []
    return [f"real outputs        {counts.continued} prompts continued a real output, {counts.made_up} could not"]


def text_notes(counts: TextCounts) -> list[str]:
    notes = []
    if counts.longer:
        notes.append(
            f"{counts.longer} prompts are {counts.longer_tokens} tokens longer in all: behind their last block was no "
            "room for the chat template's end"
        )
    if counts.outgrown:
        notes.append(
            f"{counts.outgrown} prompts are longer than captured: earlier outputs came back as more tokens than were "
            "generated (some engines repeat the prompt in the output)"
        )
    if counts.template_blocks:
        notes.append(
            f"{counts.template_blocks} leading blocks in all lie within the chat template: every prompt shares them"
        )
    return notes


@dataclass(slots=True)
class TextReplay:
    """Makes one shard's prompts of words, all rounds; counts as it goes."""

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
        """With the fields of the captured shape that the API has."""
        api = prompt.form.api
        known = {name: value for name, value in shape.items() if name not in UNKNOWN_TO[api]} | fields.patch()
        return conversation_body(
            api, model, prompt.conversation, tokens, stream=stream, extra=known, dialect=prompt.form.dialect
        )

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(0, len(self.text_maker.target.words.texts))

    def prompt(self, captured: Captured, numbers: TokenIds, before: "Exchange | None" = None) -> ChatPrompt:
        form = self.form_of(captured)
        assert form is not None  # it is sent in words
        if before is not None:
            prompt = self._going_on(captured, numbers, before) if before.prompt.form is form else None
            self.counts.continued += prompt is not None
            self.counts.made_up += prompt is None
            if prompt is not None:
                return prompt
        fitted = self._fit(captured, numbers, [EMPTY_MESSAGE])
        if fitted is None:
            # Unknown template: as many words as there were tokens, without a promise of exact lengths.
            return ChatPrompt(form, [self._user(numbers)])
        self.counts.template_blocks += min(fitted.start // self.block_size, len(captured.hashes))
        return ChatPrompt(form, [self._user(fitted.numbers)])

    def _going_on(self, captured: Captured, numbers: TokenIds, before: "Exchange") -> ChatPrompt | None:
        """Continue a real output; null: the capture did not, or the length is unknown."""
        if not goes_on(captured, before.captured):
            return None
        output = before.prompt.answered(before.response)
        fitted = self._fit(captured, numbers, [*before.prompt.conversation, output, EMPTY_MESSAGE])
        return None if fitted is None else before.prompt.going_on(before.response, [self._user(fitted.numbers)])

    def _fit(self, captured: Captured, numbers: TokenIds, conversation: Sequence[SentMessage]) -> "Fitted | None":
        """Choose words of the last message that keep their places; null: lengths unknown."""
        gaps = self.text_maker.gaps(order_of(conversation))
        start = self.text_maker.length(conversation, len(conversation) - 1)
        if gaps is None or start is None:
            return None
        ending = len(gaps.ids[-1])
        whole_blocks = len(captured.hashes) * self.block_size
        said = numbers[start : max(len(numbers) - ending, min(whole_blocks, len(numbers)))]
        if not len(said):  # the template alone is as long as the prompt was
            said = numbers[-1:]
        longer = start + len(said) + ending - len(numbers)
        if start > len(numbers) and len(conversation) > 1:
            self.counts.outgrown += 1
        else:
            self.counts.longer += longer > 0
            self.counts.longer_tokens += longer
        return Fitted(start, said)

    def _user(self, numbers: TokenIds) -> SentMessage:
        return self.text_maker.message("user", numbers)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Words of a message, and the number of tokens before it."""

    start: int
    numbers: TokenIds


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt with its response, for the prompts that go on from it."""

    captured: Captured
    prompt: ChatPrompt
    response: Response


def goes_on(captured: Captured, before: Captured) -> bool:
    """True if a captured prompt begins with all cached blocks of ``before``, its output included."""
    known = [*before.hashes, *(before.output_hashes or ())]
    return len(captured.hashes) >= len(known) > 0 and list(captured.hashes[: len(known)]) == known


def open_text(target: TextTarget, dialect: Dialect, block_size: int) -> TextReplay:
    text_maker = open_text_maker(target.text)
    engine_block = target.engine_block_size or block_size
    forms = {api: TextForm(api, text_maker, dialect, engine_block) for api in PATHS}
    return TextReplay(target.api, text_maker, forms, block_size)


def text_api_of(endpoint: str | None) -> TextApi | None:
    return next((api for api, path in PATHS.items() if path == endpoint), None)


def orders(turns: int) -> list[Order]:
    return [("user", *("assistant", "user") * before) for before in range(turns)]
