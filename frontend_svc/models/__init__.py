"""The models that can be served: their cards, files, adapters and aliases."""
