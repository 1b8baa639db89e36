"""Arrays of many objects as a table of words for kernels, a row for each object (``measure.machinecode.arguments``).

A shape says what is in the table's row: a named tuple's class with a shape for each field, down to the arrays' types.
"""

from typing import Any

import numpy as np

from measure.machinecode.arguments import ALIGNED, ARRAY_WORDS, WRITEABLE, add_argument
from measure.machinecode.kernels import late_intrinsic
from sim.kernels import layout
from sim.kernels.layout import Draws, Places, Pool, Scheduler, SimState, Tier, Timeline

Shape = Any
"""An array's, of ``array_of``; or a class and the shapes of its fields, in order."""


def array_of(dtype: Any, dimensions: int = 1) -> Shape:
    return np.dtype(dtype), dimensions, ALIGNED | WRITEABLE


def shape_of(one: type[Any], **fields: Any) -> Shape:
    """Return the shape of a named tuple; ``fields``: shapes, or dtypes of arrays of one dimension."""
    shapes = (fields[name] for name in one._fields)
    return one, tuple(array_of(shape) if isinstance(shape, np.dtype) else shape for shape in shapes)


_FLOATS, _PLACES, _INTS, _KEYS = (np.dtype(one) for one in (np.float64, np.int64, np.int32, np.uint64))
POOL = shape_of(
    Pool,
    settings=layout.SETTINGS,
    counts=layout.POOL,
    segments=layout.SEGMENT,
    copies=layout.COPY,
    holds=layout.HOLD,
    table=_INTS,
    keys=_KEYS,
)
ENGINE_STATE = shape_of(
    SimState,
    scheduler=shape_of(
        Scheduler,
        settings=layout.SETTINGS,
        pool=POOL,
        tier=shape_of(
            Tier,
            state=layout.TIERS,
            counts=layout.TIER_COUNTS,
            blocks=layout.TIER_BLOCK,
            table=_INTS,
            requests=layout.TIER_REQUEST,
        ),
        requests=layout.REQUEST,
        running=_PLACES,
        shares=array_of(layout.SHARE, 2),
        steps=layout.STEP,
        state=layout.SCHEDULE,
        stats=layout.PREFIX_STATS,
        finished=_PLACES,
        due=_PLACES,
        also_due=_PLACES,
    ),
    costs=_FLOATS,
    clock=layout.CLOCK,
    runs=layout.REQUEST_RUN,
    arrivals=layout.EVENT,
    events=layout.EVENT,
    jobs=_PLACES,
    done=layout.EVENT,
    draws=shape_of(
        Draws,
        step_key=_KEYS,
        step_knots=_FLOATS,
        step_table=array_of(_FLOATS, 2),
        normals=_FLOATS,
        weights=_FLOATS,
        frontend=_FLOATS,
    ),
    timeline=shape_of(Timeline, starts_ms=_FLOATS, ends_ms=_FLOATS, rows=array_of(_FLOATS, 2), seen_ms=_FLOATS),
    token_steps=_INTS,
    itl_ms=_FLOATS,
)


def table(rows: int, shape: Shape) -> Places:
    """Return a table without addresses, with room for ``shape`` in each row."""
    return np.zeros((rows, _words_of(shape)), np.int64)


def note(row: Places, shape: Shape, arrays: Any) -> None:
    """Write the addresses of ``arrays``, which the caller keeps alive, into a row of the table.

    Kernels write into no array that may be read-only: keys, and arrivals that another process sent.
    """
    kinds: list[Any] = []
    words: list[int] = []
    add_argument(arrays, kinds, words)
    if _writeable(kinds[0]) != shape:
        raise TypeError(f"arrays of {kinds[0]}; expected {shape}")
    row[: len(words)] = words


def _writeable(kind: Any) -> Shape:
    if isinstance(kind[0], type):
        return kind[0], tuple(map(_writeable, kind[1]))
    return *kind[:2], kind[2] | WRITEABLE


def _words_of(shape: Shape) -> int:
    return sum(map(_words_of, shape[1])) if isinstance(shape[0], type) else ARRAY_WORDS


def reader(shape: Shape) -> Any:
    """Return a function for kernels: the arrays of ``shape`` in row ``row`` of a table."""

    @late_intrinsic
    def arrays_at(_: Any, addresses: Any, row: Any) -> Any:
        from numba.core import cgutils  # noqa: PLC0415 - see late_intrinsic
        from numba.np.arrayobj import make_array  # noqa: PLC0415

        from measure.machinecode.tables import type_of  # noqa: PLC0415

        made = type_of(shape)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            held = make_array(signature.args[0])(context, builder, arguments[0])
            words = builder.bitcast(held.data, cgutils.intp_t.as_pointer())
            return builder.gep(words, [builder.mul(arguments[1], builder.extract_value(held.shape, 1))])

        return made(addresses, row), generate

    return arrays_at
