"""Child processes: start, supervise and stop."""
