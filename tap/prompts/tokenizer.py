"""A model's own tokenizer and chat template, as vLLM applies them, in the recorder process only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tap.prompts.chatmessages import UntokenizableError, template_messages, template_tools
from tap.prompts.segmentcache import SegmentCache, find_cut


class Tokenizer(Protocol):
    """Text and conversations to token ids; both methods raise UntokenizableError."""

    def encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return the ids of a text."""

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Return the ids of a chat request's prompt."""


PROBE = "a"
"""Text of every vocabulary, to find the special tokens around a text."""


class TransformersTokenizer:
    """Completion prompts get special tokens, chats only those their template writes: vLLM's defaults."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode: Callable[[str], Sequence[int]] = self._encode_whole
        self.segments: SegmentCache | None = None
        """Null: this tokenizer cannot be cut exactly, and encodes each text whole."""
        self._around: tuple[list[int], list[int]] | None = None
        """Special tokens before and after a text; null: they depend on the text."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            self._use_backend(backend)

    def _use_backend(self, backend: Any) -> None:
        """Encode by the Rust tokenizer: the overhead of transformers costs more than a short text."""
        backend.no_truncation()
        backend.no_padding()

        def encode(text: str) -> Sequence[int]:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
            return ids

        cut = find_cut(backend.to_str())
        self.segments = None if cut is None else SegmentCache(cut, encode)
        self._encode = encode if self.segments is None else self.segments.encode
        self._around = _around(encode(PROBE), self._encode_specially(PROBE))

    def encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return the ids of a text."""
        if not add_special_tokens:
            return self._encode(text)
        if self._around is None:
            return self._encode_specially(text)
        before, after = self._around
        return [*before, *self._encode(text), *after]

    def _encode_whole(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _encode_specially(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=True)["input_ids"]
        return ids

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Return the ids of a chat request's prompt, with tools, template and template arguments."""
        return self.encode_text(self.render(body), add_special_tokens=body.get("add_special_tokens") is True)

    def render(self, body: Mapping[str, Any]) -> str:
        tools = template_tools(body.get("tools"))
        template = self._template(body, tools)
        messages = template_messages(body.get("messages"), template)
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, **_template_arguments(body)
            )
        except Exception as error:  # a template may raise any error; the engine would refuse the request too
            raise UntokenizableError("template_failed") from error
        return str(rendered)

    def _template(self, body: Mapping[str, Any], tools: list[dict[str, Any]] | None) -> str:
        if body.get("chat_template") is not None:
            # A stranger's program: engines refuse it by default, and it could run for ever here.
            raise UntokenizableError("client_chat_template")
        try:
            template = self._tokenizer.get_chat_template(None, tools=tools)
        except ValueError:
            raise UntokenizableError("no_chat_template") from None
        return str(template)


def _around(plain: Sequence[int], special: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """Return the ids before and after ``plain`` in ``special``; null if it is not there in one piece."""
    size = len(plain)
    for at in range(len(special) - size + 1):
        if list(special[at : at + size]) == list(plain):
            return list(special[:at]), list(special[at + size :])
    return None


def _template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template's arguments beside messages and tools: the request's own fields, then the client's."""
    arguments: dict[str, Any] = {
        "add_generation_prompt": body.get("add_generation_prompt", True) is not False,
        "continue_final_message": body.get("continue_final_message") is True,
    }
    if body.get("documents"):
        arguments["documents"] = body["documents"]
    effort = body.get("reasoning_effort")
    if effort is not None:
        arguments |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    own = body.get("chat_template_kwargs")
    if isinstance(own, dict):
        arguments |= {
            name: value
            for name, value in own.items()
            if name not in ("chat_template", "tokenize", "tools", "conversation", "return_dict", "return_tensors")
            and name not in ("add_generation_prompt", "continue_final_message", "documents")
        }
    return arguments
