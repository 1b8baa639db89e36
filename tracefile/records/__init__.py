"""The record schema and its decoding; the errors that name bad input."""
