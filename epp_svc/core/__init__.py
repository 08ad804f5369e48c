"""What a picker decides: the exchange of one request, its endpoints, its priority (pure)."""
