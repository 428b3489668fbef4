# Everything this project can do, one target each; `make help` lists them.
# Needs make and Python >= 3.11. Another Python: make PYTHON=python3.12 book

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
# Extra arguments, e.g. make test ARGS="tests/core/test_walk.py -x"
ARGS ?=
# What other commands test; ARGS that name files of tests/ may name these, too.
ELSEWHERE = --ignore tests/explorer --ignore tests/looking/test_looking_page.py --ignore tests/course --ignore tests/colab
# Processes of `make test` and `make book` that run at a time, each with one thread.
JOBS ?= 2

# What the surroundings must not decide. Colab sets PYTHONPATH; a matplotlib back end set for a terminal would
# keep figures out of the notebooks; a kernel named python3 in the user's home would run the notebooks elsewhere.
# Without bytecode every process, of which the tests start many, would compile what it imports anew.
unexport PYTHONPATH PYTHONHOME MPLBACKEND PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE = 1
export JUPYTER_PREFER_ENV_PATH = 1
# Beside the packages, so that no other environment's list of fonts, and no style of the user's, changes figures.
export MPLCONFIGDIR = $(abspath $(VENV))/matplotlib

# One thread a process: the tests' models are small, and JOBS processes run side by side.
PYTEST = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MPLBACKEND=agg $(RUN) -m pytest

.DEFAULT_GOAL := help
.PHONY: help set-up book test pages course slides faults wasm lint format drawings notebooks results measure benchmarks gpu lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

set-up:  ## make .venv from requirements.lock; every other target does it when needed
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found; install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) tools/bootstrap.py $(VENV)

book: set-up  ## run every notebook and build the book in _build/html, warnings are errors
	@$(RUN) -m tools.build_book --jobs $(JOBS)

test: set-up  ## run the test suite; ARGS="..." goes to pytest, e.g. ARGS="-m 'not slow'"
	@$(PYTEST) --numprocesses $(JOBS) --dist worksteal $(if $(findstring tests/,$(ARGS)),,$(ELSEWHERE)) $(ARGS)

pages: set-up  ## test the explorer, the page of `look` and those of the built book in a headless Chromium
	@$(PYTEST) --numprocesses $(JOBS) --dist worksteal tests/explorer tests/looking/test_looking_page.py tests/pages

course: set-up  ## grade model solutions, planted mistakes and attacks on the assignments as a teacher would (minutes)
	@$(PYTEST) --numprocesses $(JOBS) --dist worksteal tests/course $(ARGS)

slides: set-up  ## build the course's slides in _build/slides, warnings are errors
	@OMP_NUM_THREADS=1 $(RUN) -m sphinx -q -b revealjs -W --keep-going course/slides _build/slides

faults: set-up  ## kill a small run 20 times with kill -9, also while it saves, and compare the bits
	@ATLIB_KILLS=20 $(PYTEST) tests/train/test_faults.py

lint: set-up  ## check style (ruff), types (ty) and which room imports from which (import-linter)
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m ty check --python $(VENV)
	@PYTHONPATH=. $(VENV)/bin/lint-imports --no-logo --cache-dir _build/import_linter

format: set-up  ## put the code into the form that `make lint` asks for
	@$(RUN) -m ruff check --quiet --fix
	@$(RUN) -m ruff format --quiet

drawings: set-up  ## draw anew those of book/assets/drawings that show records and models
	@$(RUN) -m tools.drawings

wasm: set-up  ## compile the explorer's C file, atbook/explorer/vit.c, anew (needs clang and lld)
	@$(RUN) -m tools.wasm

notebooks: set-up  ## write notebooks/*.ipynb anew from notebooks/*.md
	@$(RUN) tools/notebooks.py

results: set-up  ## repeat the experiments where records are missing (about 33 hours for all on 2 cores)
	@$(RUN) -m atbook experiment --all --jobs 2

measure: set-up  ## measure seconds and memory of every notebook into results/notebooks.jsonl; needs an idle machine
	@$(RUN) tools/measure_notebooks.py

benchmarks: set-up  ## time a walk, transfer steps, classification and the import, as ratios within one run
	@$(RUN) benchmarks/steps.py
	@$(RUN) benchmarks/import_time.py
	@$(RUN) benchmarks/transfer_step.py
	@$(RUN) benchmarks/others.py
	@$(RUN) benchmarks/throughput.py
	@$(RUN) benchmarks/processes.py
	@$(RUN) benchmarks/dry_run.py

gpu: set-up  ## what a GPU is asked for, in parts of nine minutes: ARGS="--parts tests steps --out FOLDER"
	@$(RUN) benchmarks/on_a_gpu.py $(ARGS)

lock: set-up  ## write requirements.lock and environment.yml anew from pyproject.toml; UPGRADE=1 takes the newest
	@$(RUN) tools/lock.py $(if $(UPGRADE),--upgrade)

clean:  ## remove the built book and the caches, keep .venv
	rm -rf _build .pytest_cache .ruff_cache .hypothesis *.egg-info build
