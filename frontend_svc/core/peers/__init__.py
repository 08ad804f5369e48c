"""Decisions about routers and workers: circuit breaker, router choice. Pure."""
