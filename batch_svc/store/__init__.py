"""The database of a batch service: files, batches, lines and the lease of the runner."""
