"""The Responses API over a WebSocket: messages, lanes, the connection and its handshake."""
