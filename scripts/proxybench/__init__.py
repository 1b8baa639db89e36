"""Parts of the proxy benchmark."""
