"""Functions compiled to machine code, which is kept on disk and called without a compiler."""
