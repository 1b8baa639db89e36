"""Machine code called by LLVM's linker and ctypes alone, without Python's lock."""

import contextlib
import ctypes
import os
import pickle
from array import array
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import llvmlite
import numpy as np
from llvmlite import binding as llvm

from measure.machinecode.arguments import NO_WORDS
from measure.machinecode.files import MachineCode

SYMBOL: Final = "kvtape_entry"
_NONE_RETURNED, _RAISED = -2, 1
_Function: Final = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_INTEGER, _FLOAT, _UNSIGNED, _TRUTH = "int64", "float64", "uint64", "bool"
RESULTS: Final = ("none", _INTEGER, _FLOAT, _UNSIGNED, _TRUTH)
_WORD = 8


class _Exception(ctypes.Structure):
    """numba's description of an exception: pickled class, arguments and place."""

    _fields_ = (("data", ctypes.c_void_p), ("length", ctypes.c_int32))


@cache
def machine() -> bytes:
    """Return all that machine code depends on but its source: processor, numba, its settings, numpy and LLVM."""
    numba = Path(getattr(find_spec("numba"), "origin", None) or "").with_name("_version.py")
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("NUMBA_"))
    told = [one for one in settings if not one.startswith("NUMBA_CACHE_DIR=")]
    features = llvm.get_host_cpu_features().flatten()
    with contextlib.suppress(OSError):
        told.append(Path(".numba_config.yaml").read_text(errors="replace"))  # where numba looks for it
    parts = [np.__version__, llvmlite.__version__, llvm.get_process_triple(), llvm.get_host_cpu_name(), features, *told]
    return "\n".join(parts).encode() + numba.read_bytes()


def load(made: MachineCode) -> Callable[[list[int]], Any]:
    """Return a function of a table: NO_WORDS and the arguments' words."""
    engine = _linked(made.code)
    function, result = _Function(engine.get_function_address(SYMBOL)), made.result

    def call(words: list[int], _engine: Any = engine) -> Any:
        try:
            table = array("q", words)
        except OverflowError:
            large = next(word for word in words if not -(1 << 63) <= word < 1 << 63)
            raise TypeError(f"{large}: an integer for machine code; expected 64 bits, or numpy.uint64") from None
        start = table.buffer_info()[0]
        status = function(start, start + _WORD, start + len(NO_WORDS) * _WORD)
        if status and status != _NONE_RETURNED:
            raise _exception(status, table[1])
        return table[0] if result == _INTEGER else _converted(table, result)

    return call


def _linked(code: bytes) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _converted(table: Any, result: str) -> Any:
    if result == "none":
        return None
    if result == _TRUTH:
        return bool(table[0])
    kind = ctypes.c_double if result == _FLOAT else ctypes.c_uint64
    return kind.from_buffer(table).value


def _exception(status: int, address: int) -> BaseException:
    if status != _RAISED or not address:
        return RuntimeError(f"machine code ended with status {status}; expected a result or an exception")
    described = _Exception.from_address(address)
    kind, arguments, _ = pickle.loads(ctypes.string_at(described.data, described.length))
    raised: BaseException = kind(*arguments or ())
    return raised
