"""The interface of an API: the request's reader and the response's writer (``Api``, ``ResponseEncoder``)."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from sim.serving.engine.service import Service
from sim.serving.requests.fields import Asked
from sim.serving.requests.output import FinishReason, Generation
from sim.serving.requests.vocabulary import Vocabulary


class Usage(NamedTuple):
    """Token counts of a request, over its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """None: not to be told (in the middle of a stream)."""

    def fields(self) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.cached_tokens is not None:
            counts["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return counts


class Delta(NamedTuple):
    """New tokens of a choice since the last event: ``start`` to ``stop`` of its output."""

    generation: Generation
    start: int
    stop: int
    finish_reason: FinishReason | None

    @property
    def token_ids(self) -> list[int]:
        return self.generation.output.token_ids[self.start : self.stop]

    def text(self, vocabulary: Vocabulary) -> str:
        """The text gained; the token that ends an output is counted and not spoken, and neither is a stop string."""
        token_ids, output = self.token_ids, self.generation.output
        if output.spoken_chars is not None:
            before = len(vocabulary.decode(output.token_ids[: self.start]))
            return vocabulary.decode(token_ids)[: max(0, output.spoken_chars - before)]
        return vocabulary.decode(token_ids[:-1] if self.finish_reason == "stop" else token_ids)


class ResponseEncoder(Protocol):
    """Encodes one response. Streamed parts are complete server-sent events; an empty one is not written."""

    def tokens(self, place: int, token_ids: Sequence[int]) -> list[bytes]:
        """Return each token's event, made before the tokens come; empty: events of this kind are not made ahead."""
        return []

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        """Return the events for a choice's new tokens, with ``usage`` where the client wants it in every event."""

    def closing(self, usage: Usage) -> bytes:
        """Return the events after the end of all choices."""

    def whole(self, deltas: list[Delta], usage: Usage) -> bytes:
        """The response in one piece; a delta for each choice, holding all of it."""


class Api(Protocol):
    """Requests and responses of a generating endpoint."""

    id_prefix: str

    def read(self, service: Service, body: bytes) -> Asked:
        """A request's body. Raises ApiError."""

    def encoder(self, service: Service, asked: Asked, response_id: str, created_s: int) -> ResponseEncoder:
        """Return the writer of the response to ``asked``."""
