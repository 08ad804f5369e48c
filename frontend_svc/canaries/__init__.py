"""Requests by which a frontend tests that each model is served."""
