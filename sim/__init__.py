"""A prefix cache's effect on traffic: vLLM's block pool and scheduler in virtual time, and a model of step times."""

from tracefile import compiled as compiled  # before any module that may be compiled
