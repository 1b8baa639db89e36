"""The step loop compiled: the pool, the scheduler, the front end and the clock over flat records, rule by rule as in
``sim.pool``, ``sim.scheduler``, ``sim.sharedcore`` and ``sim.engine``, which say why and stay the oracle."""
