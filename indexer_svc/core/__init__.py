"""The indexer's pure logic: no I/O, no clock, no randomness."""
