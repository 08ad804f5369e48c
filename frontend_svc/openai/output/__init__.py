"""Responses of chats and completions: objects, events, extensions."""
