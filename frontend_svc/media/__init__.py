"""Loads the media that requests contain or refer to."""
