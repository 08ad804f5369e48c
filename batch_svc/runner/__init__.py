"""Runs the lines of batches, under the lease of the database."""
