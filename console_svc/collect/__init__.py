"""Reads the mesh, once for all viewers."""
