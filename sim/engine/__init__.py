"""Engine in virtual time: step loop around vLLM's scheduler and KV cache; fleets; predicted traces."""

import tracefile.compiled  # noqa: F401 - before any module that may be compiled
