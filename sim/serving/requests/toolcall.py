"""A tool call as an answer: the tokens that spell it, and the text that a client gets of each."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sim.serving.requests.tools import Tool, draw_arguments
from sim.serving.requests.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of one tool."""

    call_id: str
    name: str
    arguments: str
    """JSON."""
    is_named: bool
    """The request asked for this very tool."""
    token_ids: list[int]
    name_tokens: int
    """So many tokens say which tool it is; none of them is part of the arguments."""
    argument_tokens: int
    """So many follow that are the arguments; the rest only closes the call."""

    def fragment(self, vocabulary: Vocabulary, token_ids: Sequence[int], start: int, stop: int) -> str:
        """The piece of the arguments that tokens ``start`` to ``stop`` of an answer spell; blanks behind included."""
        first = max(start, self.name_tokens)
        closing = range(self.name_tokens + self.argument_tokens, len(self.token_ids))
        said = [token_ids[place] for place in range(first, stop) if place not in closing]
        return vocabulary.decode(said) if said else ""


def draw_call(tool: Tool, vocabulary: Vocabulary, seed: int) -> ToolCall:
    """A call of ``tool`` with arguments that its schema allows."""
    # ASCII, so that no token ends within a character; compact, as it comes back from clients that parse it.
    arguments = _ascii(msgspec.json.encode(draw_arguments(tool.parameters, seed)).decode())
    before, spelled, after = vocabulary.spell_call(tool.name, arguments)
    call_id = f"call_{seed:016x}"
    return ToolCall(
        call_id, tool.name, arguments, tool.is_named, [*before, *spelled, *after], len(before), len(spelled)
    )


def _ascii(text: str) -> str:
    if text.isascii():
        return text
    units = text.encode("utf-16-be")
    codes = [int.from_bytes(units[place : place + 2], "big") for place in range(0, len(units), 2)]
    return "".join(chr(code) if code < 128 else f"\\u{code:04x}" for code in codes)
