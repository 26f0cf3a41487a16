# Two commands matter: `make book` renders the book from the committed logs, `make test` passes all tests.
# Each makes its own environment from the lock on first use; nothing needs root. `make help` lists the rest.
PYTHON ?= python3
RUN ?= data/runs/campaign
CAMPAIGN = --requests 300 --max-new 256
PIP = -m pip --disable-pip-version-check install --progress-bar off -q
ADVICE = the installation failed. Check the network and the disk space (4 GB), then run the same command again; `make clean-env` starts afresh

# Folders may have accents, whatever the locale says.
export PYTHONUTF8 = 1

.PHONY: help book test env env-all logs lab pdf bench lint refresh lock clean clean-env
.DELETE_ON_ERROR:

help:
	@echo "make book     render the book from the logs into _build/html (no torch needed)"
	@echo "make test     all tests, with the engine"
	@echo "make env      analysis environment in .venv      make env-all  the same with the engine, in .venv-all"
	@echo "make logs     collect RUN=$(RUN) anew from the prompts (PROMPTS=folder), on this CPU"
	@echo "make lab      explore thresholds in JupyterLab   make pdf      the book as one PDF (needs Chromium)"
	@echo "make bench    benchmarks   make lint  style   make refresh  store notebook outputs   make clean  delete _build"

# An environment knows the folder that it was made in; one that was moved or copied along is made anew.
$(foreach env,.venv .venv-all,$(shell if [ -f $(env)/.made-in ] && [ "$$(cat $(env)/.made-in)" != "$$(pwd)" ]; then rm -rf $(env); fi))

.venv/.made-in .venv-all/.made-in: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, but '$(PYTHON)' is older or missing; say for instance: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Making $(@D) from requirements.lock (one to three minutes, once) ..."
	@$(PYTHON) -m venv $(@D) || { echo "python -m venv failed; on Debian or Ubuntu install the package python3-venv"; exit 1; }
	@$(@D)/bin/python $(PIP) --require-hashes -r requirements.lock || { echo "$(@D): $(ADVICE)"; exit 1; }
	@if [ $(@D) = .venv-all ]; then echo "Adding the engine (torch, transformers) ..."; \
	  $(@D)/bin/python $(PIP) -r requirements-engine.txt || { echo "$(@D): $(ADVICE)"; exit 1; }; fi
	@$(@D)/bin/python $(PIP) --no-build-isolation --no-deps -e . || { echo "$(@D): $(ADVICE)"; exit 1; }
	@pwd > $@

.venv-all/.made-in: requirements-engine.txt

env: .venv/.made-in

env-all: .venv-all/.made-in

book: env
	@.venv/bin/specsel book

test: env-all
	@.venv-all/bin/specsel fetch
	.venv-all/bin/python -m pytest -m "not gpu" $(TESTS)

logs: env-all
	.venv-all/bin/specsel fetch
	OMP_NUM_THREADS=1 .venv-all/bin/specsel collect $(CAMPAIGN) --executor ray --workers $$(getconf _NPROCESSORS_ONLN) $(if $(PROMPTS),--prompts "$(PROMPTS)") --out "$(RUN)"

lab: env
	SPECSEL_CHARTS=live .venv/bin/jupyter-lab notebooks

pdf: env-all
	@.venv-all/bin/specsel book --pdf

bench: env-all
	@for b in benchmarks/bench_*.py; do echo "== $$b"; .venv-all/bin/python "$$b" || exit 1; done

lint: env
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

refresh: env
	@.venv/bin/python -m specsel.paper.build

lock:
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-config --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command "make lock" requirements.in -o requirements.lock

clean:
	rm -rf _build

clean-env:
	rm -rf .venv .venv-all *.egg-info
