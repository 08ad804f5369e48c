"""Replay of request traces in virtual time, on the cores of the router and the simulated engine."""
