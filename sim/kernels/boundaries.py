"""Block boundaries of steps that only decode. Each request fills a block and takes a new one every ``block_size``
steps, and the scheduler need not compose those steps.
"""

from measure.machinecode.kernels import kernel
from sim.kernels.layout import Scheduler
from sim.kernels.pool import publish, take
from sim.kernels.scheduler import count_hashed


@kernel
def note_due(scheduler: Scheduler) -> None:
    """Note when the running requests' last blocks get full while they all only decode."""
    block_size = scheduler.settings[0].block_size
    for position in range(scheduler.state[0].num_running - 1, -1, -1):
        step = -scheduler.requests[scheduler.running[position]].num_computed % block_size
        scheduler.also_due[position] = scheduler.due[step]
        scheduler.due[step] = position + 1


@kernel
def forget_due(scheduler: Scheduler) -> None:
    block_size = scheduler.settings[0].block_size
    for position in range(scheduler.state[0].num_running):
        scheduler.due[-scheduler.requests[scheduler.running[position]].num_computed % block_size] = 0


@kernel
def is_due(scheduler: Scheduler, step: int) -> bool:
    """Return whether a block is taken or filled in the ``step``-th step after ``note_due``."""
    taking, filling = _due(scheduler, step)
    return bool(taking != 0 or filling != 0)


@kernel
def can_cross(scheduler: Scheduler, step: int) -> bool:
    """Return whether there are blocks for all, and no newly cached block that could let the queue's head in."""
    state, settings = scheduler.state[0], scheduler.settings[0]
    may_admit = (
        state.num_waiting > 0
        and state.num_running < settings.max_num_seqs
        and state.num_running < settings.max_num_batched_tokens
    )
    taking, filling = _due(scheduler, step)
    count = 0
    while taking != 0:
        count += 1
        taking = scheduler.also_due[taking - 1]
    while may_admit and filling != 0:
        request = scheduler.requests[scheduler.running[filling - 1]]
        if request.num_hashed < request.known_keys:
            return False
        filling = scheduler.also_due[filling - 1]
    return bool(count <= scheduler.pool.counts[0].num_free)


@kernel
def cross(scheduler: Scheduler, step: int) -> None:
    """Take and cache the step's blocks in the scheduler's order; composing ahead, blocks taken are full at its end."""
    ahead = scheduler.settings[0].composes_ahead
    taking, filling = _due(scheduler, step)
    while taking != 0 or filling != 0:
        if taking != 0 and (ahead or filling == 0 or taking <= filling):
            request = scheduler.requests[scheduler.running[taking - 1]]
            take(scheduler.pool, 1)
            request.num_blocks += 1
            request.room_tokens += scheduler.settings[0].block_size
            taking = scheduler.also_due[taking - 1]
        else:
            place = scheduler.running[filling - 1]
            request = scheduler.requests[place]
            publish(scheduler.pool, request, request.num_hashed, request.num_hashed + 1)
            count_hashed(scheduler, place, request.num_hashed + 1)
            filling = scheduler.also_due[filling - 1]


@kernel
def _due(scheduler: Scheduler, step: int) -> tuple[int, int]:
    """Return position + 1 of the first request that takes a block in that step, and of the first that fills one."""
    settings = scheduler.settings[0]
    taking = scheduler.due[step % settings.block_size]
    if settings.composes_ahead:
        return taking, taking
    return taking, scheduler.due[(step + 1) % settings.block_size]
