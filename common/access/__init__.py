"""Which clients may use an HTTP port: API keys, their file, and pages of other sites."""
