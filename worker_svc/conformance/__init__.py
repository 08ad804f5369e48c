"""The conformance kit: whether an engine keeps the contract of `worker_svc/engines/contract.py`."""
