"""Terminal output, and what it shows: members and frontend state."""
