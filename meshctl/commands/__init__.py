"""One module for each meshctl command."""
