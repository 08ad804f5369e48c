"""Images and audio of requests: their formats, addresses, and how they are fetched."""
