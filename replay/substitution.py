"""Output substitution: generated tokens replace recorded outputs, so that decode-filled blocks hit as captured."""

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
    """Tokens of each block hash, so far.

    After each response, the recorded output hashes are bound to the generated tokens: the prompt's last, partly filled
    block, then the output. A hash has one meaning in a run. If a prompt with synthetic tokens was sent before the
    output arrived (open loop, a parent slower than in the capture), the hash keeps the synthetic tokens, and the trace
    gives the generated block a new hash. The same holds for a second output with the same hash but different tokens.

    If the capture records the token where hash chains diverge, a block starts with the tokens of the block it branches
    from, and so does the partly filled last block of a prompt.
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
        """False: all hashes get synthetic tokens."""
        self._reused = reused
        """Output blocks that occur in later prompts, each with the number of prompt tokens at its start."""
        self._real: dict[BlockHash, TokenIds] = {}
        self._synthetic: set[BlockHash] = set()
        self._sent_starts: dict[BlockHash, TokenIds] = {}
        """First tokens, as sent, of blocks that branches share."""
        self.substituted_blocks = 0
        self.missed_blocks = 0
        """Prompt blocks sent with synthetic tokens in place of output tokens."""

    def blocks(self, hashes: Sequence[BlockHash], request_id: RequestId) -> npt.NDArray[np.uint32]:
        """Tokens of a prompt's complete blocks, shape (len(hashes), block_size). Fixes the tokens of these hashes."""
        blocks = self._expansion.blocks(hashes, request_id)
        for index, block_hash in enumerate(hashes):
            if block_hash in self._reused:
                real = self._real.get(block_hash)
                if real is not None:
                    blocks[index] = real
                    self.substituted_blocks += 1
                    continue
                self._synthetic.add(block_hash)
                self.missed_blocks += 1
            if self._branches is not None and block_hash in self._branches:
                blocks[index] = self._fix_start(block_hash, self._expansion.block_size)
        return blocks

    def tail(self, captured: Captured, count: int) -> TokenIds:
        """The ``count`` tokens after a prompt's complete blocks."""
        if self._branches is None or captured.unfilled is None or count >= self._expansion.block_size:
            return self._expansion.tail(count, captured.request_id)
        return self._fix_start(captured.unfilled, count)

    def _fix_start(self, block: BlockHash, count: int) -> TokenIds:
        """First tokens of a block; fixes them for the run."""
        tokens = self._start_tokens(block, count)
        if len(self._sent_starts.get(block, ())) < count:
            self._sent_starts[block] = tokens
        return tokens

    def _start_tokens(self, block: BlockHash, count: int) -> TokenIds:
        """First tokens of a block: generated, as sent before, of the block it branches from, or synthetic."""
        tokens: TokenIds = self._expansion.blocks([block], NO_REQUEST)[0]
        start = self._real.get(block)
        if start is None:
            if count > self._reused.get(block, count):  # beyond the prompt tokens, into an output that has not arrived
                self._synthetic.add(block)
            start = self._sent_starts.get(block)
        parent = None if self._branches is None else self._branches.parent(block)
        if start is not None:
            tokens[: len(start)] = start
        elif parent is not None:
            shared = min(parent[1], count)
            tokens[:shared] = self._start_tokens(parent[0], shared)
        return tokens[:count]

    def answered(
        self,
        request_id: RequestId,
        output_hashes: Sequence[BlockHash],
        prompt: TokenIds,
        generated: Sequence[int],
        tail: BlockHash | None = None,
    ) -> list[BlockHash]:
        """Bind recorded output hashes to generated tokens; return the valid hashes. The last token has no KV cache.

        ``tail``: name of the block that the output fills only partly.
        """
        block_size = self._expansion.block_size
        computed = np.concatenate([prompt, np.asarray(generated[:-1], dtype=np.uint32)])
        first = len(prompt) // block_size
        count = min(len(output_hashes), len(computed) // block_size - first)
        valid: list[BlockHash] = []
        shared = True
        for index, block_hash in enumerate(output_hashes[:count], start=first):
            tokens = computed[index * block_size : (index + 1) * block_size]
            # A block hash covers the complete prefix: after a block that differs, none is shared.
            shared = shared and self._bind(block_hash, tokens)
            valid.append(block_hash if shared else self._expansion.rekeyed(block_hash, request_id))
        if shared and tail is not None and count == len(output_hashes):
            self._bind(tail, computed[(first + count) * block_size :][: block_size - 1])
        return valid

    def check_integrity(self) -> None:
        """Raise AssertionError if a hash has two meanings, or an unused hash is stored."""
        assert not self._synthetic & self._real.keys()
        assert self._synthetic <= self._reused.keys()
        assert self._real.keys() <= self._reused.keys()
        assert all(len(tokens) <= self._expansion.block_size for tokens in self._real.values())

    def _bind(self, block_hash: BlockHash, tokens: TokenIds) -> bool:
        """Bind a block hash to tokens if it is free; true if these are its tokens."""
        if block_hash not in self._reused:
            return True
        if not self._enabled or block_hash in self._synthetic:
            return False
        return bool(np.array_equal(self._real.setdefault(block_hash, tokens.copy()), tokens))


def reused_blocks(requests: Sequence[Captured], block_size: int) -> dict[BlockHash, int]:
    """Output blocks that a prompt repeats or branches from, each with the number of prompt tokens at its start."""
    generated: dict[BlockHash, int] = {}
    for request in requests:
        if request.output_hashes is None:
            continue
        generated |= dict.fromkeys(request.output_hashes, 0)
        generated[request.tail] = 0
        if request.unfilled is not None:
            generated[request.unfilled] = request.prompt_tokens % block_size
    reused = {block for request in requests for block in request.hashes if block in generated}
    reused |= {request.branch.block for request in requests if request.branch is not None}
    return {block: generated[block] for block in reused if block in generated}
