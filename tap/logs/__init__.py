"""Request logs read as if a tap had seen them, and the places where their prompts part."""
