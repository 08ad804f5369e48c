"""Batches at their full size, beside streams and through the death of every process."""
