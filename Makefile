# Everything a developer runs. CI runs `make test` and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip install --disable-pip-version-check --progress-bar off --constraint constraints.txt
# Of what pip says: downloads of 100 MB and more, and what it installs.
TELL := sed -un '/^ *Downloading.*([0-9]\{3,\}\.[0-9] MB)/p; /^Installing/p'

SHELL := bash
.SHELLFLAGS := -o pipefail -c

.PHONY: setup lint type test serve proto profile bench bench-cpu bench-engine bench-tokenize bench-serving bench-load bench-directory bench-placement bench-balance bench-overload bench-tp chaos clean
.DEFAULT_GOAL := help

help:
	@echo "make serve         set up and serve a small model, by two workers, on http://127.0.0.1:8000/v1"
	@echo "make test          set up, lint, check types and imports, run every test"
	@echo "make setup         only set up, in $(VENV)"
	@echo "make lint type     only these checks"
	@echo "make proto         regenerate the modules of proto/*.proto"
	@echo "make bench-cpu       CPU speed against the machine's floor and, with PEER=DIR, a peer; writes build/bench/cpu.json"
	@echo "make profile         where a step's time goes: a table, and a flame graph in build/bench/profile.svg"
	@echo "make bench-engine    measure the engine's own overheads; writes build/bench/engine.json"
	@echo "make bench-tokenize  what the token cache saves; writes build/bench/tokenize.json"
	@echo "make bench-serving   what HTTP, Serve and gRPC cost; writes build/bench/serving.json"
	@echo "make bench-load      a minute of conversations, and what the load generator needs itself; build/bench/load.json, .html"
	@echo "make bench-directory the prefix directory under load; writes build/bench/directory.json"
	@echo "make bench-placement placement against Serve's and Ray's own; build/bench/placement.json, .svg (REPEATS=5)"
	@echo "make bench-overload  goodput at three times the capacity, and floods; writes build/bench/overload.json"
	@echo "make bench-tp        what a second rank of a worker costs; writes build/bench/tp.json"
	@echo "make chaos           kill everything again and again: nothing lost, wrong or leaked; build/bench/chaos.json, .svg (MINUTES=3)"
	@echo "make bench-balance   sixteen fake workers and a replayed trace; build/bench/balance.json, .svg"

setup: $(STAMP)

# torch comes first and alone: any other package would bring a build of its own choice along.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Pagoda needs Python 3.11 or newer, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV), which takes minutes"
	@$(PIP) torch | $(TELL)
	@$(PIP) --editable '.[dev]' | $(TELL)
	@$(BIN)/python -m pagoda.kernels.cpu
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(STAMP)
	$(BIN)/mypy

test: lint type
	$(BIN)/pagoda model fetch
	OMP_WAIT_POLICY=passive $(BIN)/pytest   # threads that wait for each other give way to who works

serve: $(STAMP)
	$(BIN)/pagoda serve --workers 2 --threads 1

proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src --grpc_python_out=src src/pagoda/proto/*.proto

bench: bench-engine bench-tokenize

bench-cpu: $(STAMP)
	$(BIN)/pagoda model fetch
	$(BIN)/python tests/bench/bench_cpu.py $(if $(PEER),--peer $(PEER))

profile: $(STAMP)
	$(BIN)/pagoda model fetch
	$(BIN)/python tests/bench/profile_cpu.py

bench-engine: $(STAMP)
	$(BIN)/python tests/bench/bench_engine.py

bench-serving: $(STAMP)
	$(BIN)/pagoda model fetch
	$(BIN)/python tests/bench/bench_serving.py

bench-load: $(STAMP)
	$(BIN)/pagoda model fetch
	$(BIN)/python tests/bench/bench_load.py

bench-directory: $(STAMP)
	$(BIN)/python tests/bench/bench_directory.py

bench-placement: $(STAMP)
	$(BIN)/pagoda model fetch
	$(BIN)/python tests/bench/bench_placement.py --repeats $(or $(REPEATS),5)

bench-balance: $(STAMP)
	$(BIN)/pagoda model fetch
	$(BIN)/python tests/bench/bench_balance.py

bench-overload: $(STAMP)
	$(BIN)/pagoda model fetch
	$(BIN)/python tests/bench/bench_overload.py

bench-tp: $(STAMP)
	$(BIN)/pagoda model fetch
	$(BIN)/python tests/bench/bench_tp.py

chaos: $(STAMP)
	$(BIN)/pagoda model fetch
	$(BIN)/python tests/faults/chaos.py --minutes $(or $(MINUTES),3) --seed $(or $(SEED),1) $(SCENARIOS)

bench-tokenize: $(STAMP)
	$(BIN)/pagoda model fetch
	$(BIN)/python tests/bench/bench_tokenize.py

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
