"""The Responses API: bodies, events, and stored responses."""
