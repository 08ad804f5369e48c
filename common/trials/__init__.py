"""Trials: inputs are compiled or loaded first in a process that can be ended."""
