"""Chat templates, detokenization and stop strings. Pure."""
