"""Which client sends a request, and what it may use: API keys, scopes, limits of tenants."""
