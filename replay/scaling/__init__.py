"""Replays of recommended worker counts over a day of virtual time (docs/scaling.md)."""
