"""The gateway: OpenAI HTTP in front, token streams behind."""
