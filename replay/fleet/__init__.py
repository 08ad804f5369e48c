"""Fleets of thousands of workers in virtual time, in one mesh or in cells (docs/adr/0057)."""
