"""The routes of the HTTP API, and the document that describes them."""
