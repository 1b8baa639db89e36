"""Block ids of a prompt as others write them: small numbers, one for every started block, equal for equal prefixes."""

from tracefile.hashing.downsampling import downsample
from tracefile.importers.blocktraces import PARTIAL_BLOCK
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record


class BlockIds:
    """Numbers of a trace's blocks in order of first use, at a block size that is a multiple of the trace's.

    A block whose hash is unknown gets a number of its own: it is shared with none. So does a partial last block,
    unless the trace was imported with its id.
    """

    def __init__(self, meta: Meta, block_size: int | None, where: str) -> None:
        self._traced = meta.block_size
        self.block_size = block_size or meta.block_size or 0
        if self._traced is None:
            raise InputError(f"{where}: meta.block_size: missing; expected a trace with block hashes")
        if self.block_size % self._traced:
            raise InputError(f"--block-size {block_size}: expected a multiple of {self._traced}, the trace's")
        self._numbers: dict[int, int] = {}
        self._partial: dict[int, int] = {}
        self._next = 0

    def of(self, record: Record) -> list[int]:
        """Ids of a record's prompt, as many as it has started blocks."""
        assert self._traced is not None
        coarse = downsample(record, self._traced, self.block_size // self._traced)
        tokens = record.prompt_tokens or 0
        known = (coarse.block_hashes or [])[: coarse.hashable_blocks]
        ids = [self._numbered(self._numbers, block) for block in known[: tokens // self.block_size]]
        ids += [self._fresh() for _ in range(tokens // self.block_size - len(ids))]
        if tokens % self.block_size:
            partial = record.extra.get(PARTIAL_BLOCK) if self.block_size == self._traced else None
            ids.append(self._numbered(self._partial, partial) if isinstance(partial, int) else self._fresh())
        return ids

    def _numbered(self, numbers: dict[int, int], block: int) -> int:
        number = numbers.get(block)
        if number is None:
            number = numbers[block] = self._fresh()
        return number

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1
