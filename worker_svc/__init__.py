"""Wraps an inference engine as a mesh worker."""
