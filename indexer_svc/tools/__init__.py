"""Command-line tools of the indexer: record KV events to a file, play a recording."""
