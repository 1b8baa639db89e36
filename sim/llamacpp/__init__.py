"""llama.cpp's prefix cache: token sequences of its slots, and the prompt cache in host memory."""
