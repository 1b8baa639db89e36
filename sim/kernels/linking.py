"""Machine code of an entry, made from all kernels that it calls at once.

numba makes machine code of each function with all that it calls, and of these again with their callers: the simulator's
took three times as long. A kernel's code stays as it was generated here. An entry takes each kernel's once, as a
function of its own module, so that LLVM also sees all the calls of each.
"""

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, Flags
from numba.core.types import unliteral  # type: ignore[attr-defined]

from tracefile.records.batches import without_collector


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


class _Whole(JITCodeLibrary):  # type: ignore[misc]
    """Code of an entry, with that of each kernel once."""

    def finalize(self) -> None:
        found = dict.fromkeys(self._linking_libraries)
        for library in self._linking_libraries:  # which grows meanwhile
            if isinstance(library, _Part):
                new = [one for one in library._linking_libraries if one not in found]
                found |= dict.fromkeys(new)
                self._linking_libraries += new
        super().finalize()

    def _optimize_final_module(self) -> None:
        for one in self._final_module.functions:
            if not one.is_declaration and one.linkage.name == "linkonce_odr":
                one.linkage = "internal"  # nothing else can call it: what all callers have a copy of goes
        super()._optimize_final_module()


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


class EntryCompiler(KernelCompiler):
    """numba's passes, which end with an entry's machine code."""

    LIBRARY = _Whole


def once_for_literals(dispatcher: Any) -> Any:
    """Let callers of ``dispatcher`` with literal numbers share the code for all numbers."""
    template_of = dispatcher.get_call_template
    dispatcher.get_call_template = lambda args, kws: template_of([unliteral(one) for one in args], kws)
    return dispatcher
