"""The step loop compiled: the pool, the scheduler, the front end and the clock over flat records, rule by rule as in
``sim.vllm.pool``, ``sim.vllm.scheduler``, ``sim.latency.sharedcore`` and ``sim.engine.engine``, which say why and
stay the oracle."""
