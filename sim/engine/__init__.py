"""The engine in virtual time, plain and compiled, and its predicted trace."""
