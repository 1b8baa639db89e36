"""Real output tokens in place of recorded ones, so that the blocks that decode filled hit as in the capture."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from loadgen.core.draws import TokenIds
from replay.capture import Captured
from replay.expansion import Expansion
from tracefile.hashing.tokenchains import Branches
from tracefile.records.schema import BlockHash, RequestId

NO_REQUEST = RequestId("")


class OutputSubstitution:
    """Tokens of each hash, so far: real output tokens in place of recorded ones, so that decode-filled blocks hit.

    After each response the recorded output hashes stand for the real tokens: the end of the prompt that filled no
    block, then the output. A hash has one meaning in a run. If a prompt with made-up tokens was sent before the real
    tokens came (open loop, a parent slower than in the capture), the hash keeps the made-up tokens, and the trace gives
    the real block a new hash. The same holds for a second output with the same hash but other tokens.

    Where the capture tells to the token where chains part, a block begins with the tokens of the block that it branches
    off from, and so does the end of a prompt that fills no block.
    """

    def __init__(
        self,
        expansion: Expansion,
        reused: Mapping[BlockHash, int],
        branches: Branches | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        self._expansion = expansion
        self._branches = branches
        self._enabled = enabled
        """False: every hash stands for made-up tokens."""
        self._reused = reused
        """Output blocks that come again, each with the number of the prompt's tokens that it begins with."""
        self._real: dict[BlockHash, TokenIds] = {}
        self._made_up: set[BlockHash] = set()
        self._begun: dict[BlockHash, TokenIds] = {}
        """First tokens, as sent, of blocks that begin as others do."""
        self.substituted_blocks = 0
        self.missed_blocks = 0
        """Prompt blocks sent with made-up tokens in place of output tokens."""

    def blocks(self, hashes: Sequence[BlockHash], request_id: RequestId) -> npt.NDArray[np.uint32]:
        """Tokens of a prompt's full blocks, shape (len(hashes), block_size); fixes their meaning."""
        blocks = self._expansion.blocks(hashes, request_id)
        for index, block_hash in enumerate(hashes):
            if block_hash in self._reused:
                real = self._real.get(block_hash)
                if real is not None:
                    blocks[index] = real
                    self.substituted_blocks += 1
                    continue
                self._made_up.add(block_hash)
                self.missed_blocks += 1
            if self._branches is not None and block_hash in self._branches:
                blocks[index] = self._begin(block_hash, self._expansion.block_size)
        return blocks

    def tail(self, captured: Captured, count: int) -> TokenIds:
        """The ``count`` tokens behind a prompt's full blocks."""
        if self._branches is None or captured.unfilled is None or count >= self._expansion.block_size:
            return self._expansion.tail(count, captured.request_id)
        return self._begin(captured.unfilled, count)

    def _begin(self, block: BlockHash, count: int) -> TokenIds:
        """First tokens of a block, which they are from now on."""
        tokens = self._first(block, count)
        if len(self._begun.get(block, ())) < count:
            self._begun[block] = tokens
        return tokens

    def _first(self, block: BlockHash, count: int) -> TokenIds:
        """First tokens of a block: real, as sent before, those of the block that it branches off from, or made up."""
        tokens: TokenIds = self._expansion.blocks([block], NO_REQUEST)[0]
        known = self._real.get(block)
        if known is None:
            if count > self._reused.get(block, count):  # more than the prompt's own tokens of an output to come
                self._made_up.add(block)
            known = self._begun.get(block)
        parent = None if self._branches is None else self._branches.parent(block)
        if known is not None:
            tokens[: len(known)] = known
        elif parent is not None:
            shared = min(parent[1], count)
            tokens[:shared] = self._first(parent[0], shared)
        return tokens[:count]

    def answered(
        self,
        request_id: RequestId,
        output_hashes: Sequence[BlockHash],
        prompt: TokenIds,
        generated: Sequence[int],
        tail: BlockHash | None = None,
    ) -> list[BlockHash]:
        """Let recorded output hashes stand for real tokens; return the valid hashes. The last token has no KV yet.

        ``tail``: name of the block that the output leaves unfilled.
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
        if shared and tail is not None and count == len(output_hashes):
            self._stands_for(tail, computed[(first + count) * size :][: size - 1])
        return true

    def check_integrity(self) -> None:
        """Raise AssertionError if a hash has two meanings, or an unneeded one is stored."""
        assert not self._made_up & self._real.keys()
        assert self._made_up <= self._reused.keys()
        assert self._real.keys() <= self._reused.keys()
        assert all(len(tokens) <= self._expansion.block_size for tokens in self._real.values())

    def _stands_for(self, block_hash: BlockHash, tokens: TokenIds) -> bool:
        """True if the hash stands for these tokens; sets them if it had none."""
        if block_hash not in self._reused:
            return True
        if not self._enabled or block_hash in self._made_up:
            return False
        return bool(np.array_equal(self._real.setdefault(block_hash, tokens.copy()), tokens))


def reused_blocks(requests: Sequence[Captured], block_size: int) -> dict[BlockHash, int]:
    """Output blocks that a prompt carries or branches off from, each with the prompt's tokens that it begins with."""
    generated: dict[BlockHash, int] = {}
    for request in requests:
        if request.output_hashes is None:
            continue
        generated |= dict.fromkeys(request.output_hashes, 0)
        generated[request.tail] = 0
        if request.unfilled is not None:
            generated[request.unfilled] = request.prompt_tokens % block_size
    again = {block for request in requests for block in request.hashes if block in generated}
    again |= {request.branch.block for request in requests if request.branch is not None}
    return {block: generated[block] for block in again if block in generated}
