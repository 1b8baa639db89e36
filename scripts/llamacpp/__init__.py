"""Programs in llama.cpp's environment: its server, and the writer of its model."""
