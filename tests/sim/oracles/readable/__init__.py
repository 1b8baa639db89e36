"""The rules of vLLM V1 as plainly as they can be written: oracles of the classes that the simulator runs."""
