"""Completions and chats as ``sim serve`` answers them."""
