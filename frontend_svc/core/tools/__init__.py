"""Tool calls and reasoning in the text of a response. Pure."""
