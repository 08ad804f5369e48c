"""The arguments of a build; `tools/build_backend.py` sets them, pyproject.toml has all others."""

from build_backend import RUNNING
from setuptools import setup

setup(**RUNNING.arguments)
