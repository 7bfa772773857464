# `make demo`, `make test`, `make bench`, `make check` and `make docs` set up what they need in .venv on first use.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test fast bench bench-gpu check docs versions format clean

demo: .venv/.demo
	$(BIN)/python examples/digits.py

# Two processes: what most machines have cores for, and tests use processes of their own.
# ARGS: what these commands are given besides, as in make test ARGS="-k digits".
pytest = HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --durations 10 $(ARGS)

test: .venv/.test
	$(pytest)

fast: .venv/.test
	$(pytest) -m "not slow"

bench: .venv/.test
	$(BIN)/python -m benchmarks.bench $(ARGS)

# Goes on where it was: `make bench-gpu MINUTES=8` again and again does the same as once with 30.
MINUTES ?= 30
bench-gpu: .venv/.test
	$(BIN)/python -m benchmarks.bench_gpu --minutes $(MINUTES)

check: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Strictly: a link that leads nowhere, or a name that is gone, is an error. The site is
# build/site/index.html; to search it, serve it: python -m http.server -d build/site.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: .venv/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

# mup brings torchvision along, which torch does not need and which, where the two builds do not match, cannot be
# imported and then breaks the import of transformers.
install = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$(1)]" \
	&& { $(BIN)/python -c "import torchvision" 2>/dev/null || $(BIN)/python -m pip uninstall --quiet --yes torchvision; } \
	&& touch $@

.venv/.demo: pyproject.toml constraints.txt | .venv/bin/python
	$(call install,examples)

.venv/.docs: pyproject.toml constraints.txt | .venv/bin/python
	$(call install,docs)

.venv/.test: pyproject.toml constraints.txt | .venv/bin/python
	$(call install,test)
	@touch .venv/.demo
