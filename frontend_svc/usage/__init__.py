"""What clients used: the rule, the counts since the start, and the records by hour."""
