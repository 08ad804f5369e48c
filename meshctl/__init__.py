"""The command line: starts a mesh, and shows its members, health and load."""
