"""vLLM V1's scheduler, block pool and KV groups in plain Python: oracles of the compiled classes."""
