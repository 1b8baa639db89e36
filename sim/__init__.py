"""What a prefix cache does to traffic: vLLM's block pool and scheduler in virtual time, and a model of step times."""
