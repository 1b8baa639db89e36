"""Programs that run in llama.cpp's own environment: its server, and the writer of its model."""
