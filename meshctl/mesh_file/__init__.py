"""The mesh file: the services of a mesh with their settings, as YAML."""
