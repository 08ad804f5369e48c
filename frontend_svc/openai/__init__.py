"""Chats and completions, the form of request into which the other APIs are translated."""
