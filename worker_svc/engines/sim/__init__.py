"""The simulated engine: scheduler, block manager, prefix cache and KV transfer."""
