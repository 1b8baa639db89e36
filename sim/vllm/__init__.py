"""The rules of vLLM V1, to be read: settings, request, block pool, scheduler."""
