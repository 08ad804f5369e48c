"""How many workers a load needs, by measured speeds and replays (docs/scaling.md)."""
