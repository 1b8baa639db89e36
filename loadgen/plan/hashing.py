"""Block hashes for a client's own trace, so that it can be replayed and simulated without a tap."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.core.draws import TokenIds
from tracefile import BlockHash, BlockHasher
from tracefile.records.schema import HashSource


@dataclass(frozen=True, slots=True)
class Chain:
    """The hashes of one request: its prompt's full blocks and those its answer filled."""

    prompt: list[BlockHash]
    output: list[BlockHash] | None
    """Null: the generated ids are unknown."""
    source: HashSource = "engine"
    """Who said what the prompt's ids are: the engine, or a tokenizer of ours."""

    def whole(self) -> list[BlockHash]:
        """Prompt and output blocks, the start of any continuation's chain."""
        return [*self.prompt, *(self.output or ())]


def continue_chain(hasher: BlockHasher, known: Sequence[BlockHash], token_ids: TokenIds) -> list[BlockHash]:
    """The chain of all full blocks of ``token_ids``, of which the first ones' hashes are ``known``."""
    tail = token_ids[len(known) * hasher.block_size :]
    return [*known, *hasher.extend(known[-1] if known else None, tail)]


def hash_request(
    hasher: BlockHasher, known: Sequence[BlockHash], prompt: TokenIds, output: Sequence[int] | None
) -> Chain:
    """The chain of a request whose prompt begins with blocks of ``known`` hashes.

    The last generated token has no KV yet when its request ends, so no block holds it.
    """
    if output is None:
        return Chain(continue_chain(hasher, known, prompt), None)
    computed = np.concatenate([prompt, np.array(output[:-1], dtype=np.uint32)])
    chain = continue_chain(hasher, known, computed)
    full = len(prompt) // hasher.block_size
    return Chain(chain[:full], chain[full:])
