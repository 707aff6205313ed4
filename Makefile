# Every target that needs the environment makes it first. Python: make install PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(VENV)/bin/pip
STAMP := $(VENV)/.installed
UV := uv==0.13.9
PROJECT := -c constraints.txt -e '.[dev,glue,slurm]'

# Whose figures `make figures` draws: run directories, or folders of some. By default those of the committed results.
RUNS ?= sweep/results/proxy/runs
ABLATIONS ?= sweep/results/proxy/ablations

# A folder of GLUE's TSV files; without one, they come from the Hugging Face Hub.
GLUE ?= $(wildcard ../shared/data/glue)

.PHONY: help install quickstart glue-quickstart tables figures proxy bench test lint format constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with every package pinned

quickstart: $(STAMP) ## train with four optimizers on two workers, then print the table (a few minutes on 2 cores)
	$(PY) train.py -m experiment=quickstart optimizer=adamw,galore,one_sided,tsr
	$(PY) -m sweep.report runs/quickstart --out reports/quickstart

glue-quickstart: $(STAMP) ## fine-tune a small encoder on MRPC with two optimizers, then print the table (minutes on 2 cores)
	OMP_NUM_THREADS=1 $(PY) train.py -m experiment=glue_quickstart optimizer=adamw,tsr data.path=$(or $(GLUE),null)
	$(PY) -m sweep.glue runs/glue_quickstart --out reports/glue_quickstart

tables: $(STAMP) ## the paper's tables, printed beside ours, from dry runs into reports/ (minutes, no training)
	$(PY) -m sweep.paper --out reports

figures: $(STAMP) ## every figure again, into reports/figures: make figures RUNS="runs/mine runs/others" ABLATIONS=
	$(PY) -m sweep.figures $(RUNS) --out reports/figures
	$(if $(ABLATIONS),$(PY) -m sweep.figures $(ABLATIONS) --out reports/figures --only $(addprefix ablation_,sided refresh interval rank embedding))

proxy: $(STAMP) ## tune four methods on a small LLaMA, then seeds and ablations (two hours on a core); what is done is skipped
	OMP_NUM_THREADS=1 $(PY) train.py -m experiment=proxy_grid logger=none
	OMP_NUM_THREADS=1 $(PY) train.py -m experiment=proxy optimizer=adamw,galore,one_sided,tsr seed=0,1,2 logger=none
	for part in sided refresh interval rank embedding; do \
	    OMP_NUM_THREADS=1 $(PY) train.py -m experiment=proxy optimizer=tsr ablation=$$part logger=none || exit 1; done
	$(PY) -m sweep.report sweep/results/proxy.csv --best --out reports/proxy --readme README.md proxy

# Timings need a machine with nothing else on it. A bench that is started again goes on with what is missing.
BENCH ?= reports/bench
bench: $(STAMP) ## measure steps and training on limited links (root, Linux), optimizer steps and memory (hours on 2 cores)
	OMP_NUM_THREADS=1 $(PY) -m sweep.bench --out $(BENCH) --readme README.md bench
	OMP_NUM_THREADS=1 $(PY) -m sweep.bench --out $(BENCH)/work --rows 16 --length 256 --workers 4 --rates 100 \
	    --methods tsr,tsr_head --readme README.md bench-work
	OMP_NUM_THREADS=1 $(PY) -m sweep.bench --out $(BENCH)/overlap --length 256 --workers 2 --rates 1000 \
	    --methods adamw,adamw_late,tsr,tsr_late --readme README.md bench-overlap
	OMP_NUM_THREADS=1 $(PY) -m sweep.bench.loss --out $(BENCH) --target 3.15 --readme README.md bench-loss
	OMP_NUM_THREADS=1 $(PY) -m sweep.bench.steps --out $(BENCH) --readme README.md bench-steps
	OMP_NUM_THREADS=1 $(PY) -m sweep.bench.steps --out $(BENCH) --model llama_350m --tokens 1024 --loop-tokens 64 \
	    --length 64 --readme README.md bench-steps-350m
	OMP_NUM_THREADS=1 $(PY) -m sweep.bench.memory --out $(BENCH) --length 32 --readme README.md bench-memory
	$(PY) -m sweep.bench.cost $(BENCH)/bench.csv --out $(BENCH) --readme README.md bench-cost

# One thread a process: the workers that tests start share the cores with pytest-xdist's own.
test: $(STAMP) ## run the whole test suite
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile

lint: $(STAMP) ## check lint rules, formatting and types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

format: $(STAMP) ## rewrite the code in the project's format
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

# The accelerator libraries stay unpinned: which of them are needed depends on the build of torch that is installed.
constraints: $(PIP) ## pin anew: the newest packages that pyproject.toml allows
	$(PY) -m pip install -q '$(UV)'
	UV_FIND_LINKS= $(PY) -m uv pip compile -q --universal --python-version 3.10 --all-extras --upgrade --no-annotate \
	    --no-header pyproject.toml -o $(VENV)/resolved.txt
	{ echo '# Made by "make constraints"; do not edit.'; \
	    grep -vE '^(nvidia-|cuda-|triton)' $(VENV)/resolved.txt; } > constraints.txt

clean: ## remove .venv and all caches; runs/ and reports/ stay
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last file that venv writes, so a half-made environment is made again.
$(PIP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	    echo "Python 3.10 or newer is needed, and '$(PYTHON)' is not. Name one: make install PYTHON=python3.12" >&2; exit 1; }
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)

# uv is several times faster than pip. It reads no PIP_* variable, so a folder of wheels meant for pip is handed on.
$(STAMP): pyproject.toml constraints.txt | $(PIP)
	@echo "Installing the packages"
	@{ $(PY) -m pip install -q '$(UV)' \
	    && UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}" $(PY) -m uv pip install -q --compile-bytecode --python $(PY) $(PROJECT); \
	} || { echo "uv failed; installing with pip"; $(PY) -m pip install -q $(PROJECT); }
	@touch $@
