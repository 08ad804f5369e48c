"""How many workers a pool needs: the rule, without clock, network or logs (pure). ADR 0054."""
