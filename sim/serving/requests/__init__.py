"""Requests and outputs of ``sim serve``: fields, vocabulary, tokens."""
