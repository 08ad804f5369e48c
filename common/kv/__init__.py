"""KV blocks: hashing, events, the prefix index and its feed. Pure."""
