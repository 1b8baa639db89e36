"""Parts of the load benchmark."""
