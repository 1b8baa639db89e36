"""Run requests through SGLang's own radix cache and KV allocator, in-process, with neither a model nor a GPU.

    VENV/bin/python sglang_radix.py < workloads.json > results.json

Needs SGLang (tried with 0.5.23 and a CPU build of torch) and nothing of this project: tests run it under SGLang's own
Python. A workload is either requests, one after the other, or operations on the bare tree:
``{"room", "page_size", "chunk", "requests": [{"tokens", "prompt"}]}``, token ids of all that is
computed and how many of them are the prompt; ``{"page_size", "operations": [[name, tokens, number, hold]]}``. What the
scheduler does between SGLang's calls is written out here.
"""

import json
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import torch

# SGLang imports torchvision, whose operators need a build for the same torch: declared, they are never called.
operators = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

MOST_TOKENS = 4096


class Rows:
    """Which slots a request's tokens are in, as SGLang's ReqToTokenPool keeps it."""

    def __init__(self, requests: int) -> None:
        self.req_to_token = torch.zeros((requests, MOST_TOKENS), dtype=torch.int32)

    def write(self, position: Any, slots: torch.Tensor) -> None:
        self.req_to_token[position] = slots.to(torch.int32)


class Pool:
    """The cache over a pool, and evictions: each node's last token and length."""

    def __init__(
        self, page: int, chunk: int | None, capacity: int, requests: int, *, bare: bool = False, evict: str = "lru"
    ) -> None:
        self.page, self.chunk = page, chunk
        kind = {"dtype": torch.float16, "device": "cpu", "kvcache": None, "need_sort": False}
        self.allocator: Any
        if self.page == 1 or bare:
            self.allocator = TokenToKVPoolAllocator(capacity, **kind)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(capacity, self.page, **kind)
            self.allocator.use_triton_kernels = False
        self.rows = Rows(requests)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.page,
                tree_components=(ComponentType.FULL,),
                tree_core_backend="python",
                eviction_policy="lru",
            )
        )
        self.evicted: list[tuple[int, int]] = []
        evict_leaf = self.cache.tree_core.evict_device_leaf

        def noted(node_id: int, is_write_back: bool) -> Any:
            key = self.cache.tree_core.node_by_id(node_id).key
            self.evicted.append((key.token_ids[-1], len(key)))
            return evict_leaf(node_id, is_write_back)

        self.cache.tree_core.evict_device_leaf = noted

    def start(self, number: int, spec: dict[str, Any]) -> tuple[Any, int]:
        """Look a request up and compute its prompt, chunk by chunk."""
        tokens, prompt = array("q", spec["tokens"]), spec["prompt"]
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:prompt], None, limit=prompt - 1)))
        hits = done = match.device_prefix_len
        request = SimpleNamespace(
            rid=str(number),
            kv=ReqKvInfo(req_pool_idx=number, cache_protected_len=hits),
            origin_input_ids=tokens[:prompt],
            full_untruncated_fill_ids=tokens,
            finished=lambda: False,
            extra_key=None,
            cache_salt=None,
            priority=0,
            session_id=None,
            session=None,
            kv_rotation_base=None,
            last_node=match.last_device_node,
            lock=self.cache.lock(match.last_device_node),
        )
        self.rows.write((number, slice(0, hits)), self.cache.path_device_indices(match.last_device_node))
        while done < prompt:
            size = min(prompt - done, self.chunk or prompt)
            evict_from_tree_cache(self.cache, size + (self.page if self.page > 1 else 0))
            self.allocate(request, done, done + size)
            done += size
            if done < len(tokens):
                self.cache.checkpoint_into_tree(request, up_to=done)
        return request, hits

    def finish(self, request: Any) -> None:
        """Decode to the end, and give everything back."""
        tokens = len(request.full_untruncated_fill_ids)
        for done in range(len(request.origin_input_ids), tokens):
            evict_from_tree_cache(self.cache, self.page)
            self.allocate(request, done, done + 1)
        request.finished = lambda: True
        self.cache.checkpoint_into_tree(request, up_to=tokens)
        self.cache.free_kv_row(request.kv, [(request.kv.cache_protected_len, tokens)])
        self.cache.unlock(request.lock)

    def allocate(self, request: Any, start: int, end: int) -> None:
        """Slots for tokens ``start`` to ``end``: the rest of a started page, then new pages."""
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        aligned = min(-(-start // self.page) * self.page, end)
        for at in range(start, aligned):
            row[at] = row[at - 1] + 1
        if aligned < end:
            slots = self.allocator.alloc(-(-(end - aligned) // self.page) * self.page)
            row[aligned:end] = slots[: end - aligned].to(torch.int32)

    def state(self, hits: int) -> dict[str, Any]:
        """What tests compare after each request or operation."""
        return {
            "hits": hits,
            "evictable": self.cache.full_evictable_size(),
            "protected": self.cache.full_protected_size(),
            "evicted": list(self.evicted),
        }


def run_requests(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """The states after each request."""
    specs = workload["requests"]
    pool, states = Pool(workload["page_size"], workload["chunk"], workload["room"], len(specs)), []
    for number, spec in enumerate(specs):
        request, hits = pool.start(number, spec)
        pool.finish(request)
        states.append(pool.state(hits))
        in_use = workload["room"] // pool.page * pool.page - pool.allocator.available_size()
        assert in_use == states[-1]["evictable"], "what a request held beside the tree was not given back"
    return states


def run_operations(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """The states after each operation; ``hits`` is how much of its tokens an insertion found, too."""
    pool, states = Pool(workload["page_size"], None, MOST_TOKENS, 1, bare=True), []
    cache, held = pool.cache, list[Any]()
    for name, tokens, number, hold in workload["operations"]:
        key, hits = RadixKey(array("q", tokens)), 0
        if name == "evict":
            cache.evict(EvictParams(num_tokens=number))
        elif name == "unlock" and held:
            cache.unlock(held.pop(number % len(held)))
        elif name in ("match", "insert"):
            result: Any
            if name == "match":
                result = cache.match_prefix(MatchPrefixParams(key=key))
                hits = result.device_prefix_len
            else:
                result = cache.insert(InsertParams(key=key))
                hits = result.prefix_len
            if hold:
                held.append(cache.lock(result.last_device_node))
        states.append(pool.state(hits))
    return states


if __name__ == "__main__":
    loads = json.load(sys.stdin)
    json.dump([run_requests(load) if "requests" in load else run_operations(load) for load in loads], sys.stdout)
