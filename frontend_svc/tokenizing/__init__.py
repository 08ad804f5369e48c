"""APIs that end with token ids: tokenize, detokenize, preprocess."""
