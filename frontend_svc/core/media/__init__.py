"""Media of chats: parts of messages, their formats, the addresses they may come from. Pure."""
