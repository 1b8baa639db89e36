"""llama.cpp's prefix cache: the chains of its slots, and the prompts that it keeps in memory beside them."""
