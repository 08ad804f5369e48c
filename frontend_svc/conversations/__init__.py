"""Conversations of OpenAI's API, which the batch service stores."""
