"""HTTP/1.1 on asyncio protocols and the rule of token arrival, for tap, loadgen and replay. No project imports."""
