PY ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export PYTHONPATH := $(CURDIR)/protos:$(CURDIR)

.DEFAULT_GOAL := help
help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-16s %s\n", $$1, $$2}'

$(BIN)/python:
	@command -v $(PY) >/dev/null || { echo "KVMesh needs Python 3.11 or newer as '$(PY)'; name another with: make PY=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PY) -m venv $(VENV)

$(VENV)/.runtime: requirements/runtime.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/runtime.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@ $(VENV)/.runtime

setup: $(VENV)/.dev ## Install everything for development into .venv

lock: $(VENV)/.dev ## Re-compile the pinned requirements from pyproject.toml
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links pyproject.toml -o requirements/runtime.txt
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links --extra dev -c requirements/runtime.txt pyproject.toml -o requirements/dev.txt

.PHONY: help setup lock
