"""Questions of an evaluation: requests with the fields that lm-eval's own API models send, and their answers.

A generation ends where the model or a stop string ends it, so no field asks for an exact length. A scoring asks for the
log probabilities of a prompt: the context and the continuation whose likelihood is wanted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from engines.dialect import COMPLETIONS_PATH, GREEDY, USAGE, Dialect
from engines.vllm import VLLM
from loadgen.core.bodyfields import merge_patch
from loadgen.core.draws import TokenIds
from loadgen.core.plan import Response
from loadgen.text.spoken import PATHS

SEED = 1234
"""lm-eval's own: an engine that draws its outputs from it draws the same here."""
MAX_TOKENS = 256
"""lm-eval's, of a task that says none."""
CHAT_STOPS = 4
"""Most stop strings of a chat in OpenAI's API."""

Likelihood = tuple[float, bool]
"""Sum of a continuation's log probabilities; True: each of its tokens is the likeliest."""
Answer = str | Likelihood
Prompt = Sequence[int] | str | list[dict[str, Any]]
"""Token ids, a text, or a chat's messages."""


@dataclass(frozen=True, slots=True)
class Question:
    """Request of an evaluation."""

    path: str
    body: bytes
    token_ids: TokenIds | None
    """Of the prompt; null: only the engine knows them."""
    max_tokens: int
    stream: bool
    stops: tuple[str, ...] = ()
    scored_from: int | None = None
    """First prompt token whose log probability counts; null: a generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionForm:
    """Common settings of all questions of a run."""

    model: str
    api: Literal["completions", "chat"] = "completions"
    dialect: Dialect = VLLM
    stream: bool = True
    extra: Mapping[str, Any] | None = None
    """The patch of ``--extra-body``."""
    max_model_len: int | None = None
    """Longer prompts lose their beginning, as in lm-eval. Null: no limit is known."""

    def generation(self, prompt: Prompt, options: Mapping[str, Any]) -> Question:
        """Return the request for an output; ``options``: a task's ``generation_kwargs``."""
        options = {name: value for name, value in options.items() if name != "do_sample"}
        usual = options.pop("max_gen_toks", MAX_TOKENS)
        max_tokens = int(options.pop("max_tokens", usual))
        stops = stop_strings(options.pop("until", None))
        token_ids = None
        if not isinstance(prompt, str) and self.api == "completions":
            token_ids = self._cut(prompt, max_tokens)
            prompt = token_ids.tolist()
        fields = {"model": self.model, "max_tokens": max_tokens, **GREEDY, "seed": SEED, "stream": self.stream}
        fields |= USAGE if self.stream else {}
        fields |= self._asks_ids()
        if stops:
            fields["stop"] = list(stops[:CHAT_STOPS] if self.api == "chat" else stops)
        path = COMPLETIONS_PATH if self.api == "completions" else PATHS["chat"]
        said = {"prompt" if self.api == "completions" else "messages": prompt}
        return Question(path, self._body(said, {**fields, **options}), token_ids, max_tokens, self.stream, stops)

    def scoring(self, context: Sequence[int], continuation: Sequence[int]) -> Question:
        """Return the request for the log probabilities of ``continuation``; its one output token is thrown away."""
        token_ids = self._cut([*context, *continuation], 1)
        fields = {"model": self.model, "max_tokens": 1, **GREEDY, "seed": SEED, "logprobs": 1, "echo": True}
        body = self._body({"prompt": token_ids.tolist()}, {**fields, "stream": False})
        start = max(1, len(token_ids) - len(continuation))
        return Question(COMPLETIONS_PATH, body, token_ids, 1, False, scored_from=start)

    def _asks_ids(self) -> dict[str, Any]:
        dialect, is_chat = self.dialect, self.api == "chat"
        asked = "return_token_ids" in (dialect.chat_constant if is_chat else dialect.constant)
        refused = is_chat and self.stream and "return_token_ids" in dialect.chat_stream_without
        return {"return_token_ids": True} if asked and not refused else {}

    def _cut(self, token_ids: Prompt, output_tokens: int) -> TokenIds:
        """Leave out the prompt's beginning where prompt and output exceed the context."""
        ids = np.asarray(token_ids, dtype=np.uint32)
        return ids if self.max_model_len is None else ids[-max(1, self.max_model_len - output_tokens) :]

    def _body(self, said: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode({**said, **merge_patch(fields, self.extra or {})})


def stop_strings(until: object) -> tuple[str, ...]:
    """Return the stop strings of a task's ``until``: one, several or none; empty ones are no stops."""
    found = [until] if isinstance(until, str) else until if isinstance(until, list | tuple) else []
    return tuple(str(stop) for stop in found if stop)


def read_answer(question: Question, response: Response) -> Answer | None:
    """Return the output's text before its first stop string, or the likelihood; null: the response has none."""
    if not response.ok:
        return None
    if question.scored_from is None:
        text = response.text
        for stop in question.stops:
            text = text.split(stop)[0]
        return text
    assert question.token_ids is not None  # a scoring is of token ids
    return likelihood(response.body, question.scored_from, len(question.token_ids))


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Echoed(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Echoed).decode


def likelihood(body: bytes, start: int, end: int) -> Likelihood | None:
    """Return the likelihood of the prompt's tokens ``start`` to ``end`` from an echoed completion; null: not told."""
    try:
        logprobs = _decode(body).choices[0].logprobs
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
        return None
    if logprobs is None or min(len(logprobs.token_logprobs), len(logprobs.top_logprobs)) < end:
        return None
    scored = list(zip(logprobs.token_logprobs[start:end], logprobs.top_logprobs[start:end], strict=True))
    known = [(value, top) for value, top in scored if value is not None and top]
    if len(known) < len(scored):
        return None
    return sum(value for value, _ in known), all(value == max(top.values()) for value, top in known)
