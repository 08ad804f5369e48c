"""Streams to routers: placements and bookings."""
