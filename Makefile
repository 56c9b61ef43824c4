# Everything a developer runs. CI runs `make test` and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m
STAMP := $(VENV)/.installed

.PHONY: setup lint type test serve proto bench bench-engine bench-tokenize clean
.DEFAULT_GOAL := help

help:
	@echo "make serve         set up and serve $(MODEL) on http://127.0.0.1:8000/v1"
	@echo "make test          set up, lint, check types and imports, run every test"
	@echo "make setup         only set up, in $(VENV)"
	@echo "make lint type     only these checks"
	@echo "make proto         regenerate the modules of proto/*.proto"
	@echo "make bench-tokenize  measure what the token cache saves; writes build/bench/tokenize.json"
	@echo "make bench-serving measure what HTTP, Serve and gRPC cost; writes build/bench/serving.json"
	@echo "make bench-engine  measure the engine's own overheads; writes build/bench/engine.json"

setup: $(STAMP)

# torch comes first and alone: any other package would bring a build of its own choice along.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Pagoda needs Python 3.11 or newer, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt torch
	$(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pagoda.kernels.cpu.build
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(STAMP)
	$(BIN)/mypy

test: lint type
	$(BIN)/pagoda model fetch $(MODEL)
	OMP_WAIT_POLICY=passive $(BIN)/pytest   # threads that wait for each other give way to who works

serve: $(STAMP)
	$(BIN)/pagoda serve --model $(MODEL) --port 8000

proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src --grpc_python_out=src src/pagoda/proto/*.proto

bench: bench-engine bench-tokenize

bench-engine: $(STAMP)
	$(BIN)/python tests/bench/bench_engine.py

bench-tokenize: $(STAMP)
	$(BIN)/python tests/bench/bench_tokenize.py

bench-serving: $(STAMP)
	$(BIN)/pagoda model fetch $(MODEL)
	$(BIN)/python tests/bench/bench_serving.py

bench-tokenize: $(STAMP)
	$(BIN)/pagoda model fetch $(MODEL)
	$(BIN)/python tests/bench/bench_tokenize.py

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
