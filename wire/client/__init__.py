"""HTTP/1.1 client: connecting, connections and the keep-alive pool."""
