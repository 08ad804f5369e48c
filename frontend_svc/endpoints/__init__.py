"""What all APIs share between a body and its response: admission, context, log, records."""
