"""The HTTP routes: OpenAI API, health and metrics."""
