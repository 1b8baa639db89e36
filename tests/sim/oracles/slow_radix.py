"""SGLang's radix cache and its pool with one request at a time, as plainly as possible: single tokens, every step.

Nothing here is fast: children are searched, leaves collected and sorted at each eviction, decode steps taken one by
one. A token is any value; equal prefixes are equal lists. Loaded by the fixture ``slow_radix``.
"""

from collections.abc import Hashable
from typing import Any

Token = Hashable


class SlowNode:
    def __init__(self, parent: "SlowNode | None", tokens: list[Token], time: int) -> None:
        self.parent, self.tokens, self.time = parent, tokens, time
        self.children: list[SlowNode] = []
        self.locks = 0

    def path(self) -> "list[SlowNode]":
        return [] if self.parent is None else [self, *self.parent.path()]

    def depth(self) -> int:
        return sum(len(node.tokens) for node in self.path())


class SlowTree:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.time = 0
        self.root = SlowNode(None, [], 0)
        self.evicted: list[tuple[Token, int]] = []
        """Last token and length of each node that was evicted."""

    def now(self) -> int:
        self.time += 1
        return self.time

    def shared(self, node: SlowNode, tokens: list[Token]) -> int:
        pages = 0
        size = self.page_size
        while (page := node.tokens[pages * size : (pages + 1) * size]) and page == tokens[
            pages * size : (pages + 1) * size
        ]:
            pages += 1
        return pages * size

    def child(self, node: SlowNode, tokens: list[Token]) -> SlowNode | None:
        return next((child for child in node.children if tokens and self.shared(child, tokens)), None)

    def split(self, node: SlowNode, at: int) -> SlowNode:
        assert node.parent is not None
        upper = SlowNode(node.parent, node.tokens[:at], self.now())
        upper.locks = node.locks
        node.parent.children.remove(node)
        node.parent.children.append(upper)
        node.parent, node.tokens, node.time = upper, node.tokens[at:], self.now()
        upper.children = [node]
        return upper

    def match(self, tokens: list[Token]) -> SlowNode:
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        node = self.root
        while child := self.child(node, tokens):
            shared = self.shared(child, tokens)
            if shared < len(child.tokens):
                node = self.split(child, shared)
                break
            node, tokens = child, tokens[shared:]
        for above in reversed(node.path()):
            above.time = self.now()
        return node

    def insert(self, tokens: list[Token]) -> SlowNode:
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        node = self.root
        while child := self.child(node, tokens):
            child.time = self.now()
            shared = self.shared(child, tokens)
            node = child if shared == len(child.tokens) else self.split(child, shared)
            tokens = tokens[shared:]
        if tokens:
            node.children.append(SlowNode(node, tokens, self.now()))
            node = node.children[-1]
        return node

    def lock(self, node: SlowNode, by: int = 1) -> None:
        for above in node.path():
            above.locks += by

    def nodes(self, below: SlowNode | None = None) -> list[SlowNode]:
        below = below or self.root
        return [node for child in below.children for node in (child, *self.nodes(child))]

    def size(self, *, locked: bool | None = None) -> int:
        return sum(len(node.tokens) for node in self.nodes() if locked is None or locked == (node.locks > 0))

    def evict(self, tokens: int) -> None:
        freed = 0
        while freed < tokens:
            leaves = [node for node in self.nodes() if not node.children and not node.locks]
            if not leaves:
                break
            oldest = min(leaves, key=lambda node: node.time)
            assert oldest.parent is not None
            oldest.parent.children.remove(oldest)
            freed += len(oldest.tokens)
            self.evicted.append((oldest.tokens[-1], len(oldest.tokens)))


class SlowPool:
    """Pages are counted singly: pages of the tree, and further pages of the request."""

    def __init__(self, capacity: int, page_size: int, chunk: int | None) -> None:
        self.tree, self.page_size, self.chunk = SlowTree(page_size), page_size, chunk
        self.pages = capacity // page_size

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def free(self, computed: int, cached: int) -> int:
        return self.pages - self.tree.size() // self.page_size - self.pages_of(computed) + cached // self.page_size

    def evict_for(self, pages: int, computed: int, cached: int) -> None:
        """Evict for the tokens that the scheduler requests, which may be more than it allocates."""
        self.tree.evict((pages - self.free(computed, cached)) * self.page_size)

    def run(self, tokens: list[Any], prompt: int) -> int:
        """``tokens`` are all that are computed. Returns how many of the prompt's hit."""
        node = self.tree.match(tokens[: prompt - 1])
        self.tree.lock(node)
        hits = computed = cached = node.depth()
        while computed < prompt:
            chunk = min(prompt - computed, self.chunk or prompt)
            self.tree.evict(
                chunk + (self.page_size if self.page_size > 1 else 0) - self.free(computed, cached) * self.page_size
            )
            computed += chunk
            assert self.free(computed, cached) >= 0
            if computed < len(tokens):
                node = self.checkpoint(node, tokens[:computed], prompt)
                cached = node.depth()
        while computed < len(tokens):
            self.evict_for(1, computed, cached)
            computed += 1
            assert self.free(computed, cached) >= 0
        node = self.checkpoint(node, tokens, prompt)
        self.tree.lock(node, -1)
        return hits

    def checkpoint(self, node: SlowNode, tokens: list[Any], prompt: int) -> SlowNode:
        reached = self.tree.insert(tokens)
        if 0 < prompt // self.page_size < len(tokens) // self.page_size:
            self.tree.insert(tokens[:prompt])
        self.tree.lock(node, -1)
        self.tree.lock(reached)
        return reached
