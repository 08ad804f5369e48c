"""The preprocessed request and the token stream between frontend and worker. Pure."""
