"""One request: state machine, retries, migration and output blocks. Pure."""
