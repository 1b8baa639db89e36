"""Machine code of an entry, made from all kernels that it calls at once.

numba makes machine code of each function with all that it calls, and of these again with their callers. The
simulator's took three times as long. Here a kernel's code stays as it was generated. An entry takes each kernel's once,
as a function of its own module, so that LLVM also sees all the calls of each.
"""

import importlib
import sys
from types import ModuleType
from typing import Any, cast

from measure.machinecode.files import MachineCode
from measure.machinecode.loading import RESULTS, SYMBOL
from tracefile.records.batches import without_collector
from tracefile.records.errors import InputError
from tracefile.records.extras import load_extra

SPARED = {"numba.np.arraymath": "scipy.linalg.cython_blas", "numba.core.typing.cffi_utils": "cffi"}
"""Parts of numba, and the import that each makes only for functions that kernels do not call."""
OF_C = {
    "ceil",
    "exp",
    "expm1",
    "floor",
    "fmod",
    "log",
    "log1p",
    "memcpy",
    "memmove",
    "memset",
    "nextafter",
    "pow",
    "sqrt",
}
"""Functions of C's library that machine code may call, besides those that LLVM takes from there by itself."""
NUMBAS_COPIES = {"numba_nextafter": "nextafter"}
"""numba's own functions of those of C's library."""


def _spare_imports() -> None:
    """Load parts of numba without the imports that they make no use of here: half of the time of its import."""
    for part, unused in SPARED.items():
        if part not in sys.modules and unused not in sys.modules:
            sys.modules[unused] = cast(ModuleType, None)  # how Python is told that there is no such module
            try:
                importlib.import_module(part)
            finally:
                del sys.modules[unused]


numba = load_extra("numba")
_spare_imports()

from numba.core.codegen import JITCodeLibrary  # noqa: E402
from numba.core.compiler import Compiler, Flags  # noqa: E402
from numba.core.types import unliteral  # type: ignore[attr-defined]  # noqa: E402

from measure.machinecode.tables import Table, fields_of, type_of  # noqa: E402


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """Code of one kernel, not yet of this machine."""

    @property
    def codegen(self) -> Any:
        """Store of functions' Python objects, which kernels have none of."""
        return self

    def set_env(self, *_: object) -> None:
        pass

    def get_pointer_to_function(self, _: str) -> int:
        self._ensure_finalized()
        return 0

    def finalize(self) -> None:
        self._finalized = True

    def _optimize_functions(self, _: object) -> None:
        """Leave it to the entry."""


class _Whole(_Part):
    """Code of an entry, with that of each kernel once."""

    def code(self, function: str) -> bytes:
        """Return an object file with ``function`` as SYMBOL."""
        found = dict.fromkeys(self._linking_libraries)
        for library in self._linking_libraries:  # which grows meanwhile
            new = [one for one in library._linking_libraries if one not in found]
            found |= dict.fromkeys(new)
            self._linking_libraries += new
        whole = self._final_module
        for library in found:
            whole.link_in(library._get_module_for_linking(), preserve=True)
        for one in whole.functions:
            if not one.is_declaration and one.name != function:
                one.linkage = "internal"  # nothing else can call it: what all callers have a copy of goes
        whole.get_function(function).name = SYMBOL
        self._optimize_final_module()
        whole.verify()
        _refuse_other_functions(whole)
        return bytes(self._codegen._tm.emit_object(whole))


def _refuse_other_functions(whole: Any) -> None:
    """Raise TypeError if the code calls another function than OF_C: it runs where numba is not imported."""
    for one in (*whole.functions, *whole.global_variables):
        if one.is_declaration and not one.name.startswith("llvm."):
            one.name = NUMBAS_COPIES.get(one.name, one.name)
            if one.name not in OF_C:
                raise TypeError(f"{one.name}: called by machine code; expected one of {', '.join(sorted(OF_C))}")


class _SharedFlags(Flags):  # type: ignore[misc]
    """Options, which numba compares at each operation that it types: equal ones are one object."""

    __hash__, __eq__ = object.__hash__, object.__eq__

    def copy(self) -> Any:
        return self


_FLAGS: dict[str, _SharedFlags] = {}


class KernelCompiler(Compiler):  # type: ignore[misc]
    """numba's passes, which leave a kernel's code to its entry."""

    LIBRARY: type[Any] = _Part

    def compile_extra(self, function: Any) -> Any:
        state = self.state
        state.library = self.LIBRARY(state.targetctx.codegen(), function.__qualname__)
        state.library.enable_object_caching()
        state.flags = _FLAGS.setdefault(state.flags.summary(), _SharedFlags(state.flags))
        with without_collector():
            return super().compile_extra(function)


class _EntryCompiler(KernelCompiler):
    LIBRARY = _Whole


def dispatcher(function: Any, passes: Any) -> Any:
    """Return numba's dispatcher of a function; callers with literal numbers share the code for all numbers."""
    options = {"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    made = numba.njit(pipeline_class=passes, **options)(function)
    template_of = made.get_call_template
    made.get_call_template = lambda args, kws: template_of([unliteral(one) for one in args], kws)
    return made


def compile_entry(called: Any, kinds: tuple[Any, ...]) -> MachineCode:
    """Compile an entry for arguments of ``kinds``, which it reads from a table."""
    if numba.config.DISABLE_JIT:
        raise InputError("NUMBA_DISABLE_JIT is set; expected it unset, as the simulator is compiled")
    table = Table("Arguments", {f"argument{place}": type_of(kind) for place, kind in enumerate(kinds)})

    def call(words: Any) -> Any:
        return called(*fields_of(words))

    compiler = dispatcher(call, _EntryCompiler)
    compiler.compile((table,))
    [made] = compiler.overloads.values()
    result = str(unliteral(made.signature.return_type))
    if result not in RESULTS:
        raise TypeError(f"{called.__qualname__}: returns {result}; expected one of {', '.join(RESULTS)}")
    return MachineCode(result, made.library.code(made.fndesc.llvm_func_name))
