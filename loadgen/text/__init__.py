"""Text for engines that take conversations: words, chats and templates, in the target's own tokens."""
