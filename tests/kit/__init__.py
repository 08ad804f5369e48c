"""What tests share. CONTRIBUTING.md states where to find what.

A name that three test files need belongs here; a builder that one file needs stays in that file.
"""
