"""The command line: starts, shows and asks the mesh."""
