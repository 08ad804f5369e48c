"""Whether the peers of a member send it work (docs/adr/0048-routable-readiness.md)."""
