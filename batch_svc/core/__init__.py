"""Decisions of the batch service (pure)."""
