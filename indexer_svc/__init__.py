"""Knows which worker holds which KV blocks."""
