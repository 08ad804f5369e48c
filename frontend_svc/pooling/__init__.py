"""Requests whose prompts are computed and not continued: one result for each prompt of a body."""
