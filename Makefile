# `make demo`, `make test`, `make bench`, `make check` and `make docs` set up what they need in .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt

.PHONY: demo test test-rest test-all test-gpu bench bench-gpu check docs pictures versions format clean

demo: $(VENV)/.demo
	$(BIN)/python examples/digits.py
	@echo "To type hydro-rasda as above, activate the environment: source $(BIN)/activate"

# Two processes: what most machines have cores for, and tests use processes of their own. Their threads wait without
# spinning, which would take the cores from each other.
# ARGS: what these commands are given besides, as in make test ARGS="-k digits".
pytest = HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations 10 $(ARGS)

# Each promise has a test here; the rest repeats them at length: all cases, kills at each point, whole clusters.
test: $(VENV)/.test
	$(pytest) -m "not slow"

test-rest: $(VENV)/.test
	$(pytest) -m slow

test-all: $(VENV)/.test
	$(pytest)

# The tests that need CUDA, or might differ there. All others see no GPU, even where there is one.
test-gpu: $(VENV)/.test
	HYDRO_RASDA_TEST_GPU=1 $(pytest) -m gpu

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.bench $(ARGS)

# Goes on where it was: `make bench-gpu MINUTES=8` again and again does the same as once with 30.
MINUTES ?= 30
bench-gpu: $(VENV)/.test
	$(BIN)/python -m benchmarks.bench --gpu --minutes $(MINUTES)

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m docs.sentences

# Strictly: a link that leads nowhere, or a name that is gone, is an error. The site is
# build/site/index.html; to search it, serve it: python -m http.server -d build/site.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Every picture of the repository, drawn anew: of what is measured, from the result files. Those of the report need a
# Chromium, and are left as they are without one.
pictures: $(VENV)/.test
	$(BIN)/python -m docs.pictures

# The suite under the oldest versions that pyproject.toml requires (other packages as new as these allow), and under the
# newest that there are.
OLDEST ?= python3.11
NEWEST ?= python3.13
versions:
	@for python in $(OLDEST) $(NEWEST); do $$python -c "" 2>/dev/null || \
		{ echo "make versions: \`$$python\` does not run; name another by OLDEST=... or NEWEST=..." >&2; exit 1; }; done
	mkdir -p build
	sed -nE '/^dependencies = /,/^]/s/^ *"([^[>]+)(\[.*])?>=(.*)",$$/\1==\3/p' pyproject.toml > build/oldest.txt
	$(MAKE) test-all VENV=build/oldest CONSTRAINTS=build/oldest.txt PYTHON=$(OLDEST)
	$(MAKE) test-all VENV=build/newest CONSTRAINTS=/dev/null PYTHON=$(NEWEST)

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# mup brings torchvision along, which torch does not need and which, where the two builds do not match, cannot be
# imported and then breaks the import of transformers.
install = @echo "Installing hydro_rasda[$(1)] into $(VENV). The first time, that takes minutes: torch is large." \
	&& $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable ".[$(1)]" \
	&& { $(BIN)/python -c "import torchvision" 2>/dev/null || $(BIN)/python -m pip uninstall --quiet --yes torchvision; } \
	&& touch $@

# For the page that the program's last line names; it brings scikit-learn, too.
$(VENV)/.demo: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(call install,report)

$(VENV)/.docs: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(call install,docs)

$(VENV)/.test: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(call install,test)
	@touch $(VENV)/.demo
