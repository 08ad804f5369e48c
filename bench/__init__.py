"""Benchmarks: each prints one JSON object as its last line, with commit and settings."""
