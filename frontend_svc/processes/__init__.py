"""A frontend of several processes that share one HTTP port (`--processes`)."""
