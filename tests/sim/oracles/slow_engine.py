"""The rules of docs/simulator.md as obviously as they can be written: lists and dicts, everything recomputed.

Written from the rules, not from ``sim``; it shares no code with it and is slow on purpose.
"""

from dataclasses import dataclass, field
from math import ceil
from typing import Any


@dataclass(eq=False)
class SlowRequest:
    name: str
    prompt: int
    output: int
    keys: list[Any]
    generated: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    promised: int = 0
    in_flight: int = 0
    stale: int = 0
    done: bool = False
    cached: int | None = None

    @property
    def known(self) -> int:
        return self.prompt + self.generated


class SlowEngine:
    def __init__(self, *, usable: int, block_size: int, seqs: int, budget: int, caching: bool) -> None:
        self.block_size, self.seqs, self.budget = block_size, seqs, budget
        self.caching = caching
        self.free = list(range(1, usable + 1))  # rule 1: block 0 is never used
        self.holders: dict[int, int] = dict.fromkeys(self.free, 0)
        self.key: dict[int, Any] = {}
        self.order_of_insertion: list[int] = []
        self.waiting: list[SlowRequest] = []
        self.running: list[SlowRequest] = []
        self.evictions = 0

    def find(self, key: Any) -> int | None:
        for block in self.order_of_insertion:  # rule 7: the first inserted
            if self.key[block] == key:
                return block
        return None

    def hits(self, request: SlowRequest) -> list[int]:
        if not self.caching:
            return []
        result: list[int] = []
        for key in request.keys[: (request.known - 1) // self.block_size]:  # rule 6
            block = self.find(key)
            if block is None:
                break
            result.append(block)
        return result

    def pop(self) -> int:
        block = self.free.pop(0)  # rule 2
        if block in self.key:
            del self.key[block]
            self.order_of_insertion.remove(block)
            self.evictions += 1
        self.holders[block] = 1
        return block

    def free_blocks_of(self, request: SlowRequest) -> None:
        hashed: list[int] = []
        unhashed: list[int] = []
        for block in reversed(request.blocks):  # rule 3
            self.holders[block] -= 1
            if self.holders[block] == 0:
                (hashed if block in self.key else unhashed).append(block)
        self.free = unhashed + self.free + hashed
        request.blocks = []
        request.computed = request.promised = 0

    def cache(self, request: SlowRequest, tokens: int) -> None:
        if not self.caching:
            return
        for position in range(tokens // self.block_size):  # rules 5, 10, 11
            block = request.blocks[position]
            if block not in self.key:
                self.key[block] = request.keys[position]
                self.order_of_insertion.append(block)

    def grow(self, request: SlowRequest, tokens: int) -> bool:
        end = request.computed + tokens
        lacking = ceil(end / self.block_size) - len(request.blocks)
        if lacking > len(self.free):
            return False
        request.blocks += [self.pop() for _ in range(lacking)]
        self.cache(request, min(end, request.known))
        return True

    def schedule(self) -> dict[str, Any]:
        budget, preempted, shares = self.budget, [], []
        for request in list(self.running):  # rule 12
            tokens = min(request.known + request.promised - request.computed, budget)
            final = request.prompt + request.output - 1
            if request not in self.running or tokens <= 0 or request.computed >= final:
                continue
            while request in self.running and not self.grow(request, tokens):
                victim = self.running.pop()  # rule 13
                self.free_blocks_of(victim)
                victim.stale = victim.in_flight
                self.waiting.insert(0, victim)
                preempted.append(victim.name)
            if request in self.running:
                shares.append((request, tokens, request.computed))
                budget -= tokens
        for request in [] if preempted else list(self.waiting):
            if budget <= 0 or len(self.running) >= self.seqs:
                break
            if request.stale:
                continue
            hits = self.hits(request)
            idle = sum(1 for block in hits if self.holders[block] == 0)
            if ceil(request.known / self.block_size) - len(hits) + idle > len(self.free):  # rules 8, 9
                break
            for block in hits:
                self.holders[block] += 1
                if block in self.free:
                    self.free.remove(block)  # rule 4
            self.waiting.remove(request)
            self.running.append(request)
            request.blocks, request.computed = list(hits), len(hits) * self.block_size
            request.cached = request.computed if request.cached is None else request.cached
            tokens = min(request.known - request.computed, budget)
            assert self.grow(request, tokens)
            shares.append((request, tokens, request.computed))
            budget -= tokens
        step = []
        for request, tokens, depth in shares:
            request.computed += tokens
            samples = request.computed == request.known + request.promised
            request.promised += samples
            request.in_flight += 1
            step.append((request, tokens, depth, samples))
        return {"shares": step, "preempted": preempted}

    def finish(self, step: dict[str, Any]) -> list[str]:
        finished = []
        for request, _, _, samples in step["shares"]:
            request.in_flight -= 1
            stale = request.stale > 0
            request.stale -= stale
            if request.done or not samples:
                continue
            request.generated += 1
            if not stale:
                request.promised -= 1
                self.cache(request, request.computed - request.promised)
            if request.generated == request.output:
                request.done = True
                self.free_blocks_of(request)
                finished.append(request.name)
                self.running = [other for other in self.running if other is not request]
                self.waiting = [other for other in self.waiting if other is not request]
        return finished
