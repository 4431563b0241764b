# Two commands: `make demo` and `make test`. Both first make .venv and install requirements into it.
# A machine with its own torch: `make demo PYTHON=python3 VENV=none` uses that Python as it is and installs nothing.
# `make help` prints the targets with the words behind their ##.

PYTHON ?= python3
VENV ?= .venv
ifeq ($(VENV),none)
PY := $(PYTHON)
else
PY := $(VENV)/bin/python
endif
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

# What `make paint` paints, with which model, and where to. The program gets them through the environment as they were
# typed, for make and the shell would read $, quotes and backquotes in them.
PROMPT ?= a red apple, 3d render
MODEL ?= demo/drawings
OUT ?= outputs
override PROMPT := $(value PROMPT)
override MODEL := $(value MODEL)
override OUT := $(value OUT)
export PROMPT MODEL OUT

ARGS ?=

.PHONY: demo finetune paint showcase test test_slow test_slurm test_hosts faults doctor_table lint clean_demo help

demo: $(VENV)/installed  ## draw pictures, train on them, paint, and check the result: 2 to 5 minutes on two CPU cores
	$(PY) demo/run.py

finetune: $(VENV)/installed  ## after make demo: teach its model a new shape from 24 pictures by LoRA, and check the result
	$(PY) demo/finetune.py

paint: $(VENV)/installed  ## paint with the small model that comes along: make paint PROMPT="a red apple, 3d render"
	@$(PY) SD_ImageGen.py --model="$$MODEL" --prompt="$$PROMPT" --out="$$OUT" --sampler dpmpp_2m --steps 20 --cfg 5

showcase: $(VENV)/installed_dev  ## real drawings from nothing on one NVIDIA GPU: half an hour; ARGS=--dry_run says what it does
	$(PY) demo/showcase.py $(ARGS)

test: $(VENV)/installed_dev  ## check style and run the tests: 11 to 15 minutes on two CPU cores
	$(PY) -m ruff check . && $(PY) -m ruff format --check .
	$(PY) -m pytest

test_slow: $(VENV)/installed_dev  ## run the tests that take minutes or gigabytes
	$(PY) -m pytest -m "slow and not gpu"

faults: $(VENV)/installed_dev  ## attack real trainings and count what they survive (docs/FAULTS.md)
	$(PY) tests/faults/run.py

doctor_table: $(VENV)/installed_dev  ## break 35 small runs on purpose and count what SD_Doctor.py finds (docs/DOCTOR.md)
	$(PY) tests/doctor/run.py

test_slurm: $(VENV)/installed_dev  ## train through slurm/*.sbatch on a Slurm of its own: 3 minutes, needs root
	$(PY) tests/slurm/run.py

test_hosts: $(VENV)/installed_dev  ## train over two network namespaces and cut the link: 3 to 5 minutes, needs root
	$(PY) tests/hosts/run.py

lint: $(VENV)/installed_dev  ## check style alone
	$(PY) -m ruff check . && $(PY) -m ruff format --check .

clean_demo:  ## remove what the demo made
	rm -r runs/demo

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z_]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.venv/installed: requirements.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q -U pip
	.venv/bin/python -m pip install -q -r requirements.txt
	touch $@

# open-clip-torch carries CLIP's vocabulary; torch-fidelity and prdc are oracles of tests/test_evaluate.py. Their
# dependencies would bring a second torchvision and are left out.
.venv/installed_dev: .venv/installed requirements-dev.txt requirements-data.txt
	.venv/bin/python -m pip install -q -r requirements-dev.txt -r requirements-data.txt
	.venv/bin/python -m pip install -q --no-deps 'open-clip-torch>=2.30' 'torch-fidelity>=0.4' 'prdc>=0.2'
	touch $@

none/installed none/installed_dev: ;
