"""The OpenAI API: request bodies, response chunks and errors. Pure."""
