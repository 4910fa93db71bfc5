# Every target sets up .venv by itself. PYTHON=… picks the interpreter, TORCH=… another build of torch.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
export PYTHON TORCH

BIN := .venv/bin
RUN_READY := .venv/ready-run
DEV_READY := .venv/ready-dev
FRAMEWORKS_READY := .venv-frameworks/ready-frameworks

CHAOS ?= examples/chaos-default.yaml
RUN_ARGS ?= --nodes 2 --procs-per-node 1 --spares 1 --durable-every 20
FAULT_ARGS ?= --chaos $(CHAOS)
TRAIN := examples/gpt/train.py
TRAIN_ARGS ?=
PYTEST_ARGS ?=
CAMPAIGN_ARGS ?=
BENCH_RUN_ARGS ?=
BENCHES ?= $(sort $(filter-out bench/campaign.py bench/run_peers.py bench/gpu_session.py bench/_%,$(wildcard bench/*.py)))

.PHONY: help run test check unit frameworks bench bench-run bench-run-slow campaign docs deps lock changelog clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'

run: $(RUN_READY) ## train a small GPT on two nodes through injected faults, and score the run
	@run_dir=runs/$$(date -u +%Y%m%dT%H%M%SZ)
	echo "A GPT of about 10 million parameters learns the source text of Python's standard library, on two nodes with"
	echo "one worker each and one spare node: first undisturbed, as the reference, then while $(CHAOS)"
	echo "kills, stops and hangs parts of the job. The run is left in $$run_dir (runs/latest)."
	echo "+ dougong run $(RUN_ARGS) --run-dir $$run_dir-undisturbed -- $(TRAIN) $(TRAIN_ARGS)"
	$(BIN)/dougong run $(RUN_ARGS) --no-score --run-dir "$$run_dir-undisturbed" -- $(TRAIN) $(TRAIN_ARGS)
	echo "+ dougong run $(RUN_ARGS) $(FAULT_ARGS) --reference $$run_dir-undisturbed --run-dir $$run_dir -- $(TRAIN) $(TRAIN_ARGS)"
	$(BIN)/dougong run $(RUN_ARGS) $(FAULT_ARGS) --reference "$$run_dir-undisturbed" --run-dir "$$run_dir" -- $(TRAIN) $(TRAIN_ARGS)

test: check unit ## check, then every test

unit: $(DEV_READY) ## every test
	$(BIN)/python -m pytest --durations=15 $(PYTEST_ARGS)

frameworks: $(FRAMEWORKS_READY) ## the tests with transformers and lightning, in .venv-frameworks
	.venv-frameworks/bin/python -m pytest --durations=5 $(PYTEST_ARGS) tests/frameworks tests/run/test_log_continuation.py

check: $(DEV_READY) ## style, types, and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(DEV_READY) ## every benchmark in turn, into bench/results/*.json and docs/benchmarks.md
	@mkdir -p bench/results
	for script in $(BENCHES); do
	    echo "+ $$script"
	    $(BIN)/python "$$script"
	done
	$(BIN)/python bench/_table.py

bench-run: $(DEV_READY) ## saving and recovery beside torchrun, DCP, DLRover and NVRx: 25 minutes, on a quiet machine
	@scripts/peers.sh
	$(BIN)/python bench/run_peers.py $(BENCH_RUN_ARGS)
	$(BIN)/python bench/_table.py

bench-run-slow: $(DEV_READY) ## the one figure that takes half an hour: a stopped rank under torchrun
	@scripts/peers.sh
	$(BIN)/python bench/run_peers.py --only slow stops --out bench/results/run_slow.json $(BENCH_RUN_ARGS)

campaign: $(DEV_READY) ## random faults from seeds, each compared with an undisturbed run
	$(BIN)/python bench/campaign.py $(CAMPAIGN_ARGS)

docs: $(DEV_READY) ## the documentation, into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -d docs/_build/doctrees docs docs/_build/html
	@echo "docs/_build/html/index.html"

deps: ## Debian packages that the tests need and this machine lacks
	@scripts/deps.sh

lock: $(DEV_READY) ## write requirements/*.txt anew
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/lock.py

changelog: $(DEV_READY) ## show what the fragments in changelog.d say so far
	$(BIN)/towncrier build --draft

clean: ## remove .venv, caches and built documentation; runs/ stays
	rm -rf .venv .venv.lock .venv-frameworks .venv-frameworks.lock docs/_build .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests bench examples scripts validation docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(RUN_READY): requirements/run.txt requirements/torch.txt pyproject.toml scripts/venv.sh
	@scripts/venv.sh run

$(DEV_READY): $(RUN_READY) requirements/dev.txt
	@scripts/venv.sh dev

$(FRAMEWORKS_READY): requirements/frameworks.txt requirements/torch.txt pyproject.toml scripts/venv.sh
	@scripts/venv.sh frameworks

.ONESHELL:
