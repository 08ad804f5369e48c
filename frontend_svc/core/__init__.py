"""The gateway's pure logic: no I/O, no clock, no randomness."""
