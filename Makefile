# `make` alone lists the targets. With an active virtual environment it is used; else .venv is made.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := $(abspath $(or $(VIRTUAL_ENV),.venv))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCK := requirements.lock
ARGS ?=

# Two cores are shared by several ranks: one thread each, or they fight for the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Bytecode is made where it is first needed (pip would compile 17,000 files, most of them for nobody)
# and kept whatever the environment says: hundreds of processes are started, each of which would
# compile all that it imports (0.7 s of CPU in place of 0.5 s per launcher).
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(PIP) install --quiet --no-compile

# Two files at a time; of those whose tests start several processes two groups: see tests/conftest.py.
# A process that dies (of a test that hangs, say) ends the run, as it does without `-n`.
TWO_AT_A_TIME := -n 2 --max-worker-restart=0

# The stamp names the checkout, because one environment can serve several, and the last installed
# one is what it imports.
STAMP := $(VENV)/.foldpipe-installed
ifneq ($(shell cat '$(STAMP)' 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif

.PHONY: FORCE help install lock run test test-all test-distributed test-gpu gpu-proof gpu-wheels test-slurm test-faults test-docs bench-smoke bench-links figures profile-step golden docs docs-page mutants playground-packages test-playground check format clean
FORCE:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Install the locked dependencies and this checkout (quick when done)

# torch goes first and alone: it is the one large download, and the rest resolves against it.
$(STAMP): pyproject.toml $(LOCK)
	@python='$(BIN)/python'; [ -x "$$python" ] || python='$(PYTHON)'; \
	"$$python" -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit( \
	  f"foldpipe needs Python 3.11 or newer, this is {v}: try make install PYTHON=python3.11")'; \
	[ -x '$(BIN)/python' ] || "$$python" -m venv '$(VENV)'
	$(INSTALL) --constraint $(LOCK) "$$(grep '^torch==' $(LOCK))"
	$(INSTALL) --requirement $(LOCK)
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@printf '%s\n' '$(CURDIR)' > '$@'

lock: ## Rewrite requirements.lock from what this environment holds
	@{ echo '# Exact versions for running and developing, torch first. `make lock` writes this file.'; \
	  $(PIP) freeze --exclude-editable --exclude foldpipe-launcher | sed -E 's/^(torch==[^+]+)\+.*/\1/' \
	    | grep -E '^torch=='; \
	  $(PIP) freeze --exclude-editable --exclude foldpipe-launcher \
	    | grep -Ev '^(torch==|nvidia-|cuda-|triton==)'; } > $(LOCK).new
	@mv $(LOCK).new $(LOCK)

run: install ## Train a pipeline of two, with a report; ARGS="schedule=foldx_fifo pp=4" asks for others
	$(BIN)/python -m launcher $(ARGS)

test: install ## Run the tests, those with several processes included (about 10 minutes on 2 cores, twice that on cores half as fast)
	$(PYTEST) $(TWO_AT_A_TIME) $(ARGS)

test-all: install ## Also the full matrices, the fault runs, and what this machine has GPUs or SLURM for
	$(PYTEST) -m '' --hypothesis-profile=full $(ARGS)

test-distributed: install ## Only the tests that start several processes
	$(PYTEST) -m 'distributed and not full and not gpu and not slurm and not faults' $(ARGS)

test-gpu: install ## Only the tests that need a GPU
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(PYTEST) -m gpu $(ARGS); \
	else echo 'make test-gpu: torch sees no GPU on this machine, so NO test was run.'; fi

gpu-proof: install ## Everything that one GPU can show, in nine minutes; ARGS=--rehearse runs it on the CPU
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.gpu_proof $(ARGS)

gpu-wheels: install ## What the proof needs on a machine without network, into build/gpu-wheels
	$(BIN)/python -m tools.gpu_proof.wheels

profile-step: install ## Where a training step's CPU time goes, by parts; ARGS="--real --flame step.svg"
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.step_profile $(ARGS)

bench-smoke: install ## Run every benchmark in its smallest form: it works, and how fast is not looked at
	$(PYTEST) -m '' tests/test_benchmarks.py tests/test_published.py tests/test_fold_on_links.py tests/test_exchange_on_links.py tests/test_figures.py $(ARGS)

BASE ?= HEAD
figures: install ## Whether the tree is slower than a commit: BASE=<commit>, HEAD if none is given (half an hour)
	$(BIN)/python -m tools.figures '$(BASE)' $(ARGS)

bench-links: install ## Fold on slow links beside torch + DDP and the simulator (Linux, root; 12 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fold_on_links $(ARGS)

test-slurm: install ## Only the tests on a real SLURM here (as root on Debian: installs it)
	$(BIN)/python -m tests.slurm.local_cluster install
	$(PYTEST) -m slurm tests/slurm $(ARGS)

test-faults: install ## Only the long fault runs, and their table (Linux; links and full disks need root)
	$(PYTEST) -m faults tests/faults tests/distributed/test_mutated_layouts.py $(ARGS)

test-docs: install ## Follow every page of the documents literally, from an empty folder (10 minutes on 2 cores)
	$(PYTEST) -m '' tests/documents tests/test_site.py tests/test_readme.py $(ARGS)

golden: install ## Rewrite tests/golden/ from what the code produces now; read the diff before you commit
	$(PYTEST) --golden $(ARGS)

mutants: install ## Put faults in, one at a time (tools/mutants.txt): do tests fail? ARGS="--only strategies/ir"
	$(BIN)/python -m tools.mutants $(ARGS)

docs: install ## Build the documentation site into build/site (no network needed; warnings are errors)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --clean $(ARGS)
	$(BIN)/python -m tools.docs.playground build/site/playground
	@echo 'build/site/index.html'

# npm's packages lie outside the sources, and are those of package-lock.json, checksums included.
NPM_STAMP := build/npm/node_modules/.package-lock.json
$(NPM_STAMP): tools/docs/package.json tools/docs/package-lock.json
	mkdir -p build/npm && cp tools/docs/package.json tools/docs/package-lock.json build/npm/
	cd build/npm && npm ci --ignore-scripts --no-audit --no-fund --prefer-offline && touch node_modules/.package-lock.json

playground-packages: $(NPM_STAMP) ## Fetch what the playground page needs from npm, once (Pyodide; 15 MB)

test-playground: playground-packages docs ## Click through the playground page in headless Chromium (CHROMIUM=path names another)
	$(BIN)/python -m tests.playground.clicks $(ARGS)

docs-page: install ## Rewrite what the program writes of docs/: schedules, tables, pictures
	$(BIN)/python -m tools.docs.pages

check: install ## Formatting, lint, types, import layers, and that the tree has not grown unnoticed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.ratchet
	$(BIN)/python -m tools.mutants --check

format: install ## Format, and repair what lint can repair by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove caches and build products; environments and runs stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
