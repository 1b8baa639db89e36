"""A prefix cache's effect on traffic: vLLM's block pool and scheduler in virtual time, and a model of step times."""
