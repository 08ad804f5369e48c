"""The life of one request: placement, legs, retries, migration, and its buffered output."""
