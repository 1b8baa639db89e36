"""The rules of SGLang's radix cache."""
