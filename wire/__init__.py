"""HTTP/1.1 on asyncio Protocols: what tap, loadgen and replay share. Imports nothing of the project."""
