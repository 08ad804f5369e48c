"""From messages to token ids: chat templates, tokenizers, control tokens."""
