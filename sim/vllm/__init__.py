"""The rules of vLLM V1, to be read: settings, request, block pool, scheduler."""

import tracefile.compiled  # noqa: F401 - before any module that may be compiled
