"""The APIs with scores of pairs of texts, from body to response."""
