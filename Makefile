# make setup | test | sanitize | demo | demo-mpi | docs | gpu-check | bench | lint | clean   (docs/how-to/install.md)
#
# By default everything runs in VENV, which is created and filled when it is missing or stale. With PYTHON=...
# on the command line that interpreter is used as it is (a GPU machine that has its own torch): nothing but
# te_lite itself is then installed.

VENV ?= .venv
BASE_PYTHON ?= python3
TEST_WORKERS ?= 2
TEST_ARGS ?=
RANKS ?= 2
DEMO_ARGS ?= --tp $(RANKS) --sequence-parallel --recipe delayed --overlap
BENCH_ARGS ?=
TREE ?= $(shell git rev-parse --verify -q HEAD:te_lite)

# CPU ranks share few cores: with more threads than cores they only wait for each other.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

# pip shows what it does where a person looks, and says nothing in a log.
QUIET = $(if $(MAKE_TERMOUT),,--quiet)

ifeq ($(origin PYTHON),command line)
MPIRUN ?= mpirun
STAMP := build/te_lite-installed
INSTALL = $(PYTHON) -m pip install $(QUIET) -e . --no-build-isolation --no-deps
else
PYTHON := $(VENV)/bin/python
MPIRUN ?= $(VENV)/bin/mpirun
STAMP := $(VENV)/te_lite-installed
INSTALL = { test -x $(PYTHON) || $(BASE_PYTHON) -m venv $(VENV); } && \
	$(PYTHON) -m pip install $(QUIET) -c constraints.txt -e '.[test,lint,demo,mpi]'
endif

# The stamp says which checkout was installed for which interpreter: an environment shared by two checkouts
# is installed anew when the other one used it last.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR) $(PYTHON))
STALE := always
endif

.PHONY: setup test sanitize lint demo demo-mpi docs gpu-check bench clean always

setup: $(STAMP)

$(STAMP): setup.py pyproject.toml constraints.txt $(wildcard te_lite/csrc/*) $(STALE)
	@echo 'installing te_lite and what it needs for $(PYTHON): 1.5 minutes on 2 cores, more on a slow network'
	@$(INSTALL)
	@mkdir -p $(@D) && echo '$(CURDIR) $(PYTHON)' > $@

# The hooks of .pre-commit-config.yaml call ruff, clang-format and mypy by name: those beside PYTHON come first.
lint: $(STAMP)
	@PATH="$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH"; export PATH; \
	if git rev-parse --git-dir > /dev/null 2>&1; then \
		PRE_COMMIT_HOME=$(CURDIR)/build/pre-commit $(PYTHON) -m pre_commit run --all-files; \
	else \
		echo 'make lint: pre-commit needs a git checkout; without it clang-format is left out'; ruff check . && mypy; \
	fi

# One pytest call, so one summary, also after a lint failure. Of the TEST_WORKERS processes
# one alone runs tests/distributed (tests/conftest.py): ranks never run beside other ranks.
test: $(STAMP)
	@echo 'make test: about half an hour on 2 cores; TEST_WORKERS=<processes> where there are more'
	@status=0; \
	$(MAKE) --no-print-directory lint || status=1; \
	$(PYTHON) -m pytest -n $(TEST_WORKERS) $(TEST_ARGS) || status=1; \
	exit $$status

# csrc is built twice for this, which is why make test leaves it out.
sanitize: $(STAMP)
	@echo 'make sanitize: about 4 minutes on 2 cores'
	$(PYTHON) tests/csrc/sanitized_extension.py

# GPUs are used when there is one for each rank, else the ranks run on the CPU.
ENOUGH_GPUS = $(PYTHON) -c 'import sys, torch; sys.exit(torch.cuda.device_count() < $(RANKS))'

demo: $(STAMP)
	@echo 'make demo: 2 to 3 minutes on 2 CPU cores, less on GPUs'
	@$(ENOUGH_GPUS) || export CUDA_VISIBLE_DEVICES=; \
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/train_gpt.py $(DEMO_ARGS)

demo-mpi: $(STAMP)
	@$(ENOUGH_GPUS) || export CUDA_VISIBLE_DEVICES=; \
	$(MPIRUN) -n $(RANKS) --allow-run-as-root --oversubscribe $(PYTHON) examples/train_gpt.py $(DEMO_ARGS)

# What builds the site is installed when it is first wanted. A broken link ends the build.
docs: $(STAMP)
	@$(PYTHON) -c 'import material, mkdocstrings_handlers.python' 2>/dev/null || \
	$(PYTHON) -m pip install $(QUIET) -c constraints.txt -e '.[docs]'
	@PATH="$(dir $(abspath $(PYTHON))):$$PATH" NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet
	@echo 'the site is out/site/index.html; its search wants a server: $(PYTHON) -m http.server -d out/site'

gpu-check: $(STAMP)
	$(PYTHON) benchmarks/gpu_check.py --tree-hash $(or $(TREE),$(error TREE is empty: outside a git \
	checkout or before the first commit pass TREE=<what git rev-parse HEAD:te_lite prints>)) $(GPU_CHECK_ARGS)

bench: $(STAMP)
	$(PYTHON) benchmarks/modules.py $(BENCH_ARGS)

clean:
	rm -rf .venv build dist *.egg-info te_lite/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -prune -exec rm -rf {} +
