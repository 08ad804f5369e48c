"""The last requests of this frontend, whether their traces are sampled or not."""
