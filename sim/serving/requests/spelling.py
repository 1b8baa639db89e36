"""The text of single tokens as JSON, found once for each: what a streamed token is made of."""

import msgspec

from sim.serving.requests.vocabulary import Vocabulary


class Spelling(dict[int, bytes]):
    """Token id to its text as a JSON string."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def __missing__(self, token_id: int) -> bytes:
        text = self[token_id] = msgspec.json.encode(self._vocabulary.decode([token_id]))
        return text
