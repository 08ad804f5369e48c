"""The router's pure logic: no I/O, no clock, no randomness."""
