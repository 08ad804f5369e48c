"""Which models and adapters are served. Pure."""
