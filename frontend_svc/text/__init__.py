"""From token ids to the text of choices."""
