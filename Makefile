# Everything runs in .venv, which `make setup` creates. `make help` lists the targets.
#
# PYTHON       interpreter to make .venv with (3.11 to 3.13)
# TORCH        what to install as torch; the lab needs it, the rest does not
# TORCH_INDEX  package index to take torch from, e.g. one that has the build for your accelerator

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || echo python3)
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup test test-slow test-vllm test-page screenshots setup-observability test-observability setup-deploy test-deploy lint format docs demo bench soak soak-memory chaos fuzz clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(READY) ## create .venv with everything the tests and the demo need

# torch comes first: what depends on it would otherwise choose a build of several gigabytes. The warning that
# is switched off is for layouts whose folders have the package's own name; ours are mapped (pyproject.toml).
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
		|| { echo "stagewatch needs Python 3.11 to 3.13: make PYTHON=... $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON); torch makes this take a few minutes"
	@$(PYTHON) -m venv $(VENV) 2>/dev/null \
		|| { apt-get update -qq && apt-get install -qq -y python3-venv && $(PYTHON) -m venv --clear $(VENV); }
	@$(PIP) --upgrade pip
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@PYTHONWARNINGS=ignore $(PIP) --editable '.[sidecar,monitor,otlp,grafana,export,lab,dev]'
	@mkdir -p build/src/stagewatch
	@for each in agents monitor dashboards; do ln -sfn ../../../$$each build/src/stagewatch/$$each; done
	@touch $@

test: setup ## the default tests, under ten minutes
	$(PYTEST)

test-slow: setup ## longer tests: many seeds, many processes
	$(PYTEST) -m slow --timeout 900

test-vllm: setup ## the real vLLM engine on CPU, in an environment of its own
	tests/vllm/setup_env.sh
	$(PYTEST) -m vllm --timeout 900

test-page: setup ## the live page in Debian's Chromium, in front of a real pipeline
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; }
	$(PYTEST) -m page

screenshots: setup ## pictures of the live page for the README, from a real run
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; }
	$(BIN)/python tests/page/screenshots.py

setup-observability: ## install Debian's Prometheus and Alertmanager, for test-observability
	@command -v prometheus >/dev/null && command -v prometheus-alertmanager >/dev/null \
		|| { apt-get update -qq && apt-get install -qq -y --no-install-recommends prometheus prometheus-alertmanager; }

test-observability: setup setup-observability ## dashboards, rules and alerts on a real Prometheus and Alertmanager
	$(PYTEST) -m observability --timeout 180

setup-deploy: setup-observability ## kubectl and systemd's checkers, from Debian where they are missing
	@command -v kubectl >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends kubernetes-client; }
	@command -v systemd-analyze >/dev/null && command -v ip >/dev/null \
		|| { apt-get update -qq && apt-get install -qq -y --no-install-recommends systemd iproute2; }

test-deploy: setup setup-deploy ## manifests, units, compose and container files; a missing tool fails
	NEED_TOOLS=1 $(PYTEST) -m 'slow or not slow' --timeout 400 tests/deploy

lint: setup ## formatting, lint, types, import contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd build/src && ../../$(BIN)/lint-imports ../../pyproject.toml

format: setup ## rewrite the code as `make lint` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## rewrite what is generated from the code: parts of docs/, dashboards, alert rules
	$(BIN)/python -m stagewatch.monitor.docs
	$(BIN)/python -m stagewatch.monitor.checkdocs > docs/checks.md
	$(BIN)/python -m stagewatch.dashboards
	$(BIN)/python deploy/prometheus_rule.py

demo: setup ## watch a real pipeline desynchronise and be caught
	$(BIN)/stagewatch demo

bench: setup ## every benchmark, or those in NAMES, each beside its references; rewrites docs/bench.json and its page
	OMP_NUM_THREADS=1 $(BIN)/python tests/bench/run.py $(NAMES) --repeats $(or $(REPEATS),3) --json docs/bench.json --table docs/benchmarks.md

soak: setup ## ten million request-steps with every legitimate event: no incident
	$(BIN)/python tests/checks/soak.py --request-steps 10000000

fuzz: setup ## every decoder in the hands of a coverage-guided fuzzer, SECONDS (300) for each
	for each in frames rings journals traces bundles; do \
		$(BIN)/python tests/fuzz/fuzz_$$each.py --seconds $(or $(SECONDS),300) --corpus $$(mkdir -p build/corpus/$$each && echo build/corpus/$$each) || exit 1; \
	done

chaos: setup ## kill, stop and restart everything for an hour or so, by a seed that is printed
	$(BIN)/python tests/chaos/chaos.py --runs $(or $(RUNS),60) --seconds 40 $(if $(SEED),--seed $(SEED))

soak-memory: setup ## half an hour of 50 000 rows a second: the collector's memory stays flat (docs/durability.md)
	$(BIN)/python tests/chaos/soak_memory.py --json docs/soak-memory.json --svg docs/img/soak-memory.svg

clean: ## remove what the targets above made
	rm -rf $(VENV) .venv-vllm* build *.egg-info .mypy_cache .ruff_cache .pytest_cache
