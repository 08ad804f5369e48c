"""KV events of the engine: normalized, logged and published to indexers."""
