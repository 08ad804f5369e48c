"""What fleets of up to 10,000 workers and 100 routers cost their members (`make bench-scale`)."""
