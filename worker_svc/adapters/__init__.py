"""Which adapters a worker holds: desired by the namespace, placed by the workers themselves."""
