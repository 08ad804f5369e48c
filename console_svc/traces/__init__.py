"""Spans that services export to this console, and the tree of a request."""
