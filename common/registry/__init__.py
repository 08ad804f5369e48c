"""Service discovery: instances, model cards, and the file and Consul registries."""
