"""What all APIs share between a body and its response: dispatch, generation, streams, records."""
