"""The Anthropic Messages API: bodies, translation to chats, responses, errors."""
