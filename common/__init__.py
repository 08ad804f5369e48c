"""What two rooms or more need: one noun a file."""
