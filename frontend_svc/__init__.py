"""The frontend: OpenAI HTTP for clients, token streams to workers."""
