"""vLLM V1's rules: settings, request, block pool, KV cache, scheduler, preemption."""

import tracefile.compiled  # noqa: F401 - before any module that may be compiled
