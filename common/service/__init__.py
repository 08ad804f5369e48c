"""The life cycle that all services share."""
