"""Output substitution: real output tokens in place of recorded ones, so that decode-filled blocks hit again.

In the capture, a block of generated tokens had a hash, and the next turn's prompt carries that hash. The replayed
engine generates other tokens and caches those; the next turn hits them only if its prompt has the same tokens. So after
each response, the recorded output hashes stand for the real tokens: the end of the prompt that filled no block, then
the output.

A hash has one meaning in a run. If a prompt with made-up tokens was sent before the real ones came (open loop, a parent
slower than in the capture), the hash keeps the made-up tokens, and the trace gives the real block a new hash. The same
holds for a second output with the same hash but other tokens.
"""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from loadgen.core.draws import TokenIds
from replay.expansion import Expansion
from tracefile import BlockHash, RequestId


class OutputSubstitution:
    """Tokens of each hash, so far."""

    def __init__(self, expansion: Expansion, reused: Collection[BlockHash], *, enabled: bool = True) -> None:
        self._expansion = expansion
        self._enabled = enabled
        """Off, every hash stands for made-up tokens: what a replay without output substitution."""
        self._reused = frozenset(reused)
        """Recorded output hashes that some prompt carries; no others need remembering."""
        self._real: dict[BlockHash, TokenIds] = {}
        self._made_up: set[BlockHash] = set()
        self.substituted_blocks = 0
        """Prompt blocks sent with real generated tokens."""
        self.missed_blocks = 0
        """Prompt blocks sent with made-up tokens where the capture had generated ones."""

    def blocks(self, hashes: Sequence[BlockHash], request_id: RequestId) -> npt.NDArray[np.uint32]:
        """Return the tokens of a prompt's full blocks, shape (len(hashes), block_size); fixes their meaning."""
        blocks = self._expansion.blocks(hashes, request_id)
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._reused:
                continue
            real = self._real.get(block_hash)
            if real is not None:
                blocks[index] = real
                self.substituted_blocks += 1
            else:
                self._made_up.add(block_hash)
                self.missed_blocks += 1
        return blocks

    def answered(
        self,
        request_id: RequestId,
        output_hashes: Sequence[BlockHash],
        prompt: TokenIds,
        generated: Sequence[int],
    ) -> list[BlockHash]:
        """Let the recorded output hashes stand for the real tokens; returns the hashes that are true in this run.

        Fewer than recorded if fewer tokens came. The last token has no KV yet, so no block holds it.
        """
        size = self._expansion.block_size
        computed = np.concatenate([prompt, np.asarray(generated[:-1], dtype=np.uint32)])
        first = len(prompt) // size
        count = min(len(output_hashes), len(computed) // size - first)
        true: list[BlockHash] = []
        shared = True
        for index, block_hash in enumerate(output_hashes[:count], start=first):
            tokens = computed[index * size : (index + 1) * size]
            # A block's identity is its whole prefix: behind one that differs, none is shared.
            shared = shared and self._stands_for(block_hash, tokens)
            true.append(block_hash if shared else self._expansion.rekeyed(block_hash, request_id))
        return true

    def check_integrity(self) -> None:
        """Raise AssertionError if a hash has two meanings, or an unneeded one is stored."""
        assert not self._made_up & self._real.keys()
        assert self._made_up <= self._reused
        assert self._real.keys() <= self._reused
        assert all(len(tokens) == self._expansion.block_size for tokens in self._real.values())

    def _stands_for(self, block_hash: BlockHash, tokens: TokenIds) -> bool:
        """Return whether the hash has these tokens, from now on if it had none yet."""
        if block_hash not in self._reused:
            return True
        if not self._enabled or block_hash in self._made_up:
            return False
        return bool(np.array_equal(self._real.setdefault(block_hash, tokens.copy()), tokens))
