"""The longest prefix hit that all KV groups agree on, as in ``sim.vllm.hybrid``, compiled."""

from typing import Any

from measure.machinecode.kernels import kernel, stay_apart
from sim.kernels.groups import CHUNK, FULL, WINDOW, GroupPool, first_in_line, key_at
from sim.kernels.pool import NONE
from sim.vllm import rules

_blocks_for = kernel(rules.blocks_for)


@kernel
def look_up(pool: GroupPool, request: Any) -> int:
    """Find the longest hit of a request's known tokens; return its tokens."""
    stay_apart()
    told, forms = pool.rules[0], pool.forms
    told.shared_tokens = told.hit_tokens = 0
    for number in range(len(forms)):
        forms[number].count = forms[number].start = 0
    if not pool.settings[0].enable_prefix_caching or request.prompt_logprobs:
        return 0
    if len(pool.groups) == 1:
        _find(pool, request, 0, request.num_tokens - 1, forms[0].drops)
        told.hit_tokens = forms[0].tokens
    else:
        _agree(pool, request)
    return int(told.hit_tokens)


@kernel
def find_alone(pool: GroupPool, request: Any, number: int) -> None:
    """Find the hit that groups of one form would have alone."""
    most = _most_looked_up(pool, request, number, request.num_tokens - 1)
    _find(pool, request, number, most, pool.forms[number].drops)


@kernel
def _agree(pool: GroupPool, request: Any) -> None:
    """Shorten the hit, form after form, until all agree."""
    told, forms, groups = pool.rules[0], pool.forms, pool.groups
    most, longest = request.num_tokens - 1, 0
    for number in range(len(forms)):
        forms[number].is_found = forms[number].has_dropped = 0
    while True:
        tokens = most
        for number in range(len(forms)):
            form = forms[number]
            if groups[form.first].kind == FULL and form.is_found:
                tokens = min(tokens, form.tokens)
                continue
            drops = form.drops > form.has_dropped
            _find(pool, request, number, _most_looked_up(pool, request, number, tokens) if drops else tokens, drops)
            if drops:
                form.has_dropped = 1
            elif form.tokens < tokens:
                for other in range(len(forms)):
                    forms[other].has_dropped = 0
            tokens, form.is_found = form.tokens, 1
            longest = max(longest, tokens)
        if tokens >= most:
            break
        most = tokens
        if len(forms) == 2 and groups[forms[0].first].kind == FULL:
            break
    for number in range(len(forms)):
        first = groups[forms[number].first]
        if first.kind == FULL:
            forms[number].count = min(forms[number].count, _blocks_for(most, first.block_size))
    told.hit_tokens = most
    if longest > most:
        told.shared_tokens = longest


@kernel
def _most_looked_up(pool: GroupPool, request: Any, number: int, tokens: int) -> int:
    """Tokens to look up for a hit of ``tokens`` after the last block is dropped; states drop none."""
    form, unit = pool.forms[number], pool.settings[0].block_size
    if not form.drops or form.margin == 0:
        return tokens
    return int(min(tokens + form.margin, request.num_tokens // unit * unit))


@kernel
def _find(pool: GroupPool, request: Any, number: int, most: int, drops: bool) -> None:
    """Find the longest hit of groups of one form within ``most`` tokens."""
    stay_apart()
    kind = pool.groups[pool.forms[number].first].kind
    if kind == FULL:
        _find_prefix(pool, request, number, most, drops)
    elif kind == WINDOW:
        _find_window(pool, request, number, most, drops)
    elif kind == CHUNK:
        _find_chunk(pool, request, number, most)
    else:
        _find_state(pool, request, number, most)


@kernel
def _has_row(pool: GroupPool, request: Any, number: int, units: int, at: int) -> bool:
    """Note the blocks at ``at`` that end at so many match units; False: a group of the form has none."""
    stay_apart()
    for place in range(len(pool.groups)):
        if pool.groups[place].form == number:
            tag, key = key_at(pool, request, place, units)
            block = pool.cache.entries[first_in_line(pool.cache, tag, key)].block
            if block == NONE:
                return False
            pool.places[place, at] = block
    return True


@kernel
def _find_prefix(pool: GroupPool, request: Any, number: int, most: int, drops: bool) -> None:
    form, alignment, unit = pool.forms[number], pool.rules[0].alignment, pool.settings[0].block_size
    size = pool.groups[form.first].block_size
    count, scale, known = 0, size // unit, request.num_tokens // unit
    while (count + 1) * size <= most and (count + 1) * scale <= known:
        if not _has_row(pool, request, number, (count + 1) * scale, count):
            break
        count += 1
    hit = count * size
    if alignment < size and size % alignment == 0:
        for end in range(min(count * scale + scale - 1, most // alignment, known), count * scale, -1):
            if _has_row(pool, request, number, end, count):
                hit = end * alignment
                break
    if drops and hit > 0:
        hit -= min(alignment, size)
    hit -= hit % alignment
    form.count, form.tokens = _blocks_for(hit, size), hit


@kernel
def _find_window(pool: GroupPool, request: Any, number: int, most: int, drops: bool) -> None:
    form, alignment = pool.forms[number], pool.rules[0].alignment
    group = pool.groups[form.first]
    size, scale = group.block_size, group.block_size // pool.settings[0].block_size
    needed, run, place = max(_blocks_for(group.span - 1, size) + drops, 1), 0, most // size - 1
    while place >= 0 and run < needed:
        if not _has_row(pool, request, number, (place + 1) * scale, place):
            run = 0
        elif run > 0 or (place + (not drops)) * size % alignment == 0:
            run += 1
        place -= 1
    form.start = place + 1
    count = form.start + run
    if run < needed:
        while count * size % alignment:
            count -= 1
    if drops and count:
        count -= 1
        while count * size % alignment:
            count -= 1
    form.count, form.tokens = count, count * size


@kernel
def _find_chunk(pool: GroupPool, request: Any, number: int, most: int) -> None:
    form = pool.forms[number]
    group = pool.groups[form.first]
    size, scale = group.block_size, group.block_size // pool.settings[0].block_size
    count = form.start = most // group.span * group.span // size
    while (count + 1) * size <= most and _has_row(pool, request, number, (count + 1) * scale, count):
        count += 1
    form.count, form.tokens = count, count * size


@kernel
def _find_state(pool: GroupPool, request: Any, number: int, most: int) -> None:
    form, alignment, unit = pool.forms[number], pool.rules[0].alignment, pool.settings[0].block_size
    size = pool.groups[form.first].block_size
    step = size
    if alignment < size and size % alignment == 0:
        step = alignment
    form.count = form.start = form.tokens = 0
    for end in range(min(most // step, request.num_tokens // unit * unit // step), 0, -1):
        tokens = end * step
        place = _blocks_for(tokens, size) - 1
        if tokens % alignment == 0 and _has_row(pool, request, number, tokens // unit, place):
            form.start, form.count, form.tokens = place, place + 1, tokens
            break
