"""Log probabilities in vLLM's shapes. There is no model, so they are made up: the same for the same token and place."""

from typing import Any

from sim.serving.requests.vocabulary import Vocabulary

_STEP = 0.75
"""How much less likely each alternative is than the one before it."""


def completion_logprobs(
    vocabulary: Vocabulary, token_ids: list[int], place: int, offset: int, count: int
) -> dict[str, Any]:
    """``logprobs`` of a completion's tokens, from the answer's number ``place``, ``offset`` characters in."""
    texts = [vocabulary.decode([token_id]) for token_id in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    chosen = [_logprob(token_id, place + number) for number, token_id in enumerate(token_ids)]
    tops = []
    for token_id, logprob in zip(token_ids, chosen, strict=True):
        ranked = enumerate(_top(vocabulary, token_id, count))
        tops.append({vocabulary.decode([other]): logprob - _STEP * rank for rank, other in ranked})
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": texts, "top_logprobs": tops}


def chat_logprobs(vocabulary: Vocabulary, token_ids: list[int], place: int, count: int) -> dict[str, Any]:
    """``logprobs`` of a chat's tokens; the Responses API has the same in its own place."""
    content = []
    for number, token_id in enumerate(token_ids):
        logprob = _logprob(token_id, place + number)
        tops = [
            _entry(vocabulary, other, logprob - _STEP * rank)
            for rank, other in enumerate(_top(vocabulary, token_id, count))
        ]
        content.append(_entry(vocabulary, token_id, logprob) | {"top_logprobs": tops})
    return {"content": content}


def _entry(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
    text = vocabulary.decode([token_id])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _logprob(token_id: int, place: int) -> float:
    return -((token_id * 2_654_435_761 + place * 40_503) % 4096) / 1024


def _top(vocabulary: Vocabulary, token_id: int, count: int) -> list[int]:
    """The chosen token and ``count`` − 1 others."""
    others = vocabulary.answer_ids
    picked = (int(others[(token_id + 7919 * rank) % len(others)]) for rank in range(1, count))
    return [token_id, *picked][:count]
