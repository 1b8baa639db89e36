"""Request logs read as if a tap had seen them."""
