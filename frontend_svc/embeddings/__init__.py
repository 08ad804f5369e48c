"""The embeddings API, from body to vectors."""
