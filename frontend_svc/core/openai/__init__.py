"""The OpenAI API: request bodies, headers, responses, chunks and errors (pure)."""
