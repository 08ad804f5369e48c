"""Connections of clients: HTTP server and protocol, ASGI, browsers."""
