"""Bodies of chats and completions: fields, validation, translation into requests of workers."""
