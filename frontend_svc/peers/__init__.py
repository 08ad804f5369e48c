"""Clients of routers and workers, and monitors of their behaviour."""
