"""What an operator may start: Explain, revocation of a key, a chat, a replay."""
