"""The client's side: ways to a server, connections to it, and the pool that keeps them."""
