"""Compiled step loop: pool, scheduler, API server and clock over flat records, rule by rule as in ``sim.vllm``."""
