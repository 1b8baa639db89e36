"""llama.cpp's slots and prompt cache as its C++ has them, step by step, on lists of tokens and in single precision.

``get_available_slot`` and ``update_slots`` of ``server-context.cpp``, ``alloc`` and ``load`` of ``server_prompt_cache``
in ``server-task.cpp``: names and order are theirs. A state's size is its tokens.
"""

from dataclasses import dataclass, field

import numpy as np

f32 = np.float32


def get_common_prefix(first: list[int], second: list[int]) -> int:
    n = 0
    while n < len(first) and n < len(second) and first[n] == second[n]:
        n += 1
    return n


@dataclass
class SlowSlot:
    tokens: list[int] = field(default_factory=list)
    t_last_used: int = -1
    processing: bool = False


class SlowServer:
    def __init__(self, slots: int, similarity: float, unified: bool, idle_slots: bool, limit: int | None) -> None:
        self.slots = [SlowSlot() for _ in range(slots)]
        self.similarity = f32(similarity)
        self.unified, self.limit = unified, limit
        self.idle_slots = idle_slots and limit != 0
        self.states: list[list[int]] = []
        self.time = 0

    def get_available_slot(self, task: list[int]) -> SlowSlot | None:
        ret, update_cache = None, False
        if self.similarity != 0:
            f_sim_best = f32(0)
            for slot in self.slots:
                if slot.processing or not slot.tokens:
                    continue
                f_sim_cur = f32(get_common_prefix(slot.tokens, task)) / f32(len(task))
                if f_sim_cur > f_sim_best and f_sim_cur > self.similarity:
                    f_sim_best, ret = f_sim_cur, slot
            if ret is not None:
                f_keep = (f_sim_best * f32(len(task))) / f32(len(ret.tokens))
                update_cache = bool(f_keep < f32(0.5))
        if ret is None:
            t_last = -1
            for slot in self.slots:
                if slot.processing:
                    continue
                if ret is None or slot.t_last_used <= t_last:
                    t_last, ret = slot.t_last_used, slot
            update_cache = True
        if ret is not None and update_cache and self.limit != 0:
            self.prompt_save(ret)
            self.prompt_load(ret, task)
        return ret

    def prompt_save(self, slot: SlowSlot) -> None:
        if not slot.tokens:
            return
        for state in self.states:
            if get_common_prefix(state, slot.tokens) == len(slot.tokens):
                return
        if self.limit is not None and len(slot.tokens) > self.limit:
            return
        self.states = [state for state in self.states if get_common_prefix(state, slot.tokens) != len(state)]
        if self.limit is not None:
            while self.states and sum(map(len, self.states)) + len(slot.tokens) > self.limit:
                del self.states[0]
        self.states.append(list(slot.tokens))

    def prompt_load(self, slot: SlowSlot, task: list[int]) -> None:
        lcp_best = get_common_prefix(slot.tokens, task)
        f_keep_best = f32(lcp_best) / f32(len(slot.tokens)) if slot.tokens else f32(-1)
        f_sim_best = f32(lcp_best) / f32(len(task))
        best = None
        for index, state in enumerate(self.states):
            lcp_cur = get_common_prefix(state, task)
            f_keep_cur, f_sim_cur = f32(lcp_cur) / f32(len(state)), f32(lcp_cur) / f32(len(task))
            if f_keep_cur < f32(0.25):
                continue
            if f_keep_best < f_keep_cur and f_sim_best < f_sim_cur:
                f_keep_best, f_sim_best, best = f_keep_cur, f_sim_cur, index
        if best is not None:
            slot.tokens = self.states.pop(best)

    def launch(self, task: list[int]) -> tuple[int, int] | None:
        """The slot's number and ``n_past``; null: the task is deferred."""
        slot = self.get_available_slot(task)
        if slot is None:
            return None
        slot.processing = True
        if self.idle_slots:
            for other in self.slots:
                if not other.processing:
                    self.prompt_save(other)
                    if self.unified:
                        other.tokens = []
        n_past = get_common_prefix(slot.tokens, task)
        if n_past == len(task) and n_past > 0:
            n_past -= 1
        return self.slots.index(slot), n_past

    def release(self, number: int, tokens: list[int]) -> None:
        self.time += 1
        slot = self.slots[number]
        slot.tokens, slot.t_last_used, slot.processing = list(tokens), self.time, False
