"""Arrays handed to kernels as a table of addresses: a call then costs the same however many arrays there are.

A shape says what is in the table's row: a named tuple's class with a shape for each field, down to the arrays' types.
"""

from typing import Any

import numpy as np

from sim.kernels import layout
from sim.kernels.compiling import late_intrinsic
from sim.kernels.layout import SOURCES, Draws, Pool, Records, Scheduler, SimState, Tier, Timeline, record

ADDRESS = record(f"address length width {SOURCES}")
"""An array of one dimension, ``width`` 1, or of two."""
_PER_ADDRESS = ADDRESS.itemsize // 8
Shape = Any
"""A dtype; a list of one, for two dimensions; or a class and the shapes of its fields, in order."""


def shape_of(one: type[Any], **fields: Shape) -> Shape:
    return one, [fields[name] for name in one._fields]


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
    blocks=layout.BLOCK,
    uses=_PLACES,
    evicted=_KEYS,
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
        shares=[layout.SHARE],
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
        step_table=[_FLOATS],
        normals=_FLOATS,
        weights=_FLOATS,
        frontend=_FLOATS,
    ),
    timeline=shape_of(Timeline, starts_ms=_FLOATS, ends_ms=_FLOATS, rows=[_FLOATS], seen_ms=_FLOATS),
    token_steps=_INTS,
    itl_ms=_FLOATS,
)


def table(rows: int, shape: Shape) -> Records:
    """Return a table without addresses, with room for ``shape`` in each row."""
    return np.zeros((rows, _count(shape)), ADDRESS)


def note(row: Records, shape: Shape, arrays: Any) -> None:
    """Write the addresses of ``arrays``, which the caller keeps alive, into a row of the table."""
    for place, (one, array) in enumerate(_pairs(shape, arrays)):
        dtype, dimensions = (one[0], 2) if isinstance(one, list) else (one, 1)
        if array.dtype != dtype or array.ndim != dimensions or not array.flags.c_contiguous:
            raise TypeError(f"array {place}: {array.dtype} in {array.ndim} dimensions; expected {dtype}")
        width = array.shape[1] if dimensions == 2 else 1
        row["address"][place], row["length"][place], row["width"][place] = array.ctypes.data, len(array), width


def _count(shape: Shape) -> int:
    return sum(map(_count, shape[1])) if isinstance(shape, tuple) else 1


def _pairs(shape: Shape, arrays: Any) -> list[tuple[Shape, Any]]:
    if not isinstance(shape, tuple):
        return [(shape, arrays)]
    return [pair for part, array in zip(shape[1], arrays, strict=True) for pair in _pairs(part, array)]


def reader(shape: Shape) -> Any:
    """Return a function for kernels: the arrays of ``shape`` in row ``row`` of a table."""

    @late_intrinsic
    def arrays_at(_: Any, addresses: Any, row: Any) -> Any:
        from numba.core import cgutils  # noqa: PLC0415 - see late_intrinsic
        from numba.core.types import BaseTuple  # type: ignore[attr-defined]  # noqa: PLC0415
        from numba.np.arrayobj import make_array  # noqa: PLC0415

        made = _type_of(shape)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            held = make_array(signature.args[0])(context, builder, arguments[0])
            words = builder.bitcast(held.data, cgutils.intp_t.as_pointer())
            first = builder.mul(arguments[1], builder.extract_value(held.shape, 1))
            places = iter(range(_count(shape)))

            def read(part: Any) -> Any:
                if isinstance(part, BaseTuple):
                    return context.make_tuple(builder, part, [read(one) for one in part])
                place = builder.mul(builder.add(first, cgutils.intp_t(next(places))), cgutils.intp_t(_PER_ADDRESS))
                return _read(context, builder, part, builder.gep(words, [place]))

            return read(made)

        return made(addresses, row), generate

    return arrays_at


def _type_of(shape: Shape) -> Any:
    from numba.core import types  # noqa: PLC0415 - see late_intrinsic
    from numba.core.types import BaseTuple  # type: ignore[attr-defined]  # noqa: PLC0415
    from numba.np.numpy_support import from_dtype  # noqa: PLC0415

    if isinstance(shape, tuple):
        return BaseTuple.from_types([_type_of(part) for part in shape[1]], shape[0])
    dtype, dimensions = (shape[0], 2) if isinstance(shape, list) else (shape, 1)
    return types.Array(from_dtype(dtype), dimensions, "C")


def _read(context: Any, builder: Any, made: Any, words: Any) -> Any:
    """Generate code that makes an array of type ``made`` from its ADDRESS at ``words``."""
    from numba.core import cgutils  # noqa: PLC0415 - see late_intrinsic
    from numba.np.arrayobj import make_array, populate_array  # noqa: PLC0415

    address, length, width = (builder.load(builder.gep(words, [cgutils.intp_t(field)])) for field in range(3))
    array = make_array(made)(context, builder)
    size = cgutils.intp_t(context.get_abi_sizeof(context.get_data_type(made.dtype)))
    lengths, strides = ([length], [size]) if made.ndim == 1 else ([length, width], [builder.mul(width, size), size])
    data = builder.inttoptr(address, array.data.type)
    populate_array(array, data=data, shape=lengths, strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()
