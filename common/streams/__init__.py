"""What the long streams between processes share: back-off, frames, connections, silence."""
