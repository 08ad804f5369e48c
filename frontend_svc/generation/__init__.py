"""From a body to one generated response: checks, tokenization, choices, the written stream."""
