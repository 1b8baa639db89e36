"""The real-time engine behind ``sim serve``."""
