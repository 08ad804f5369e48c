"""Decides which worker serves a request; never forwards it."""
