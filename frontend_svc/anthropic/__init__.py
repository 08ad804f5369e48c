"""The Messages API: its bodies become chats, and responses become messages."""
