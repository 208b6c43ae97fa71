# Everything a user or a developer runs, from nothing: each target makes the virtual environment it needs, once.
#
#   make demo            train a small GPT with diyfa's attention beside PyTorch's, and write text with it
#   make test            does it work here: what users call, refusals, tools, documentation, a sample of the numerics
#   make test-all        every test that runs on this machine
#   make lint            ruff and mypy
#   make compile-gate    every kernel compiled for every architecture of CUDA_TARGETS and every Ascend chip, without them
#   make small-pack      a pack of a few kernels, and which calls of the tests a whole one would not serve
#   make test-npu        the NPU backend on real torch_npu over host memory
#   make test-npu-oldest what depends on torch_npu, with the oldest torch and torch_npu of diyfa/npu_stacks.py
#   make test-triton3.9  the CUDA backend with Triton 3.9, or any other version that it is written for
#   make test-integrations  diyfa inside Transformers and diffusers
#   make test-browser    the page of `diyfa report` in Chromium, if that is installed
#   make stubs           the types of the public functions, from their signatures
#   make tables          the tables of both READMEs, from what the backends say and the result files have
#   make docs            the site in ./site, English and Chinese; warnings are errors
#   make dist            the wheel and the source distribution in ./dist, checked
#   make course          run the chapters of docs/course, refresh their outputs and pictures, write notebooks to ./notebooks
#   make clean           remove what these made
#
# Overridable: PYTHON (3.10 to 3.14; 3.10 or 3.11 for the NPU), VENV, VENV_NPU, TORCH_INSTALL (arguments of the `pip install` that brings
# PyTorch), TRITON_INSTALL, PYTEST_ARGS.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
VENV_NPU ?= .venv-npu
VENV_NPU_OLDEST ?= .venv-npu-oldest
CACHE := .cache
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
  "$$p" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null && echo "$$p" && break; done)
TORCH_VERSION ?= 2.13.0
# Of `make test-npu-oldest`; any other pair of diyfa/npu_stacks.py runs the same way, in a VENV_NPU_OLDEST of its own,
# the newest with `VENV_NPU_OLDEST=.venv-npu-newest OLDEST_TORCH=2.14.0 OLDEST_TORCH_NPU=2.14.0`.
OLDEST_TORCH ?= 2.7.1
OLDEST_TORCH_NPU ?= 2.7.1.post2
# The extra `npu` has no triton-ascend, because a machine with an NPU has one. Its interpreter refuses newer NumPys.
TRITON_ASCEND_INSTALL ?= triton-ascend==3.2.0 'numpy<2.3'
PYTEST_ARGS ?=

# With an NVIDIA GPU PyTorch's default build brings CUDA and its own Triton. Without one that would be gigabytes for
# nothing, so there the CPU build is asked for by its version's suffix and pip fails rather than fetch the other.
ifneq ($(shell nvidia-smi -L 2>/dev/null),)
TORCH_INSTALL ?= torch==$(TORCH_VERSION)
TORCH_SIZE := 3 GB with CUDA
DIYFA_SIZE := 80 MB
TRITON_INSTALL ?=
else ifeq ($(shell uname -s),Linux)
TORCH_INSTALL ?= torch==$(TORCH_VERSION)+cpu
TORCH_SIZE := 200 MB
DIYFA_SIZE := 270 MB
TRITON_INSTALL ?= triton==3.6.0
else
TORCH_INSTALL ?= torch==$(TORCH_VERSION)
TORCH_SIZE := 100 MB
DIYFA_SIZE := 80 MB
TRITON_INSTALL ?=
endif

# Threads that spin at barriers make small CPU operators many times slower as soon as something else runs.
export OMP_WAIT_POLICY ?= PASSIVE

# Architectures compiled, and processes that tests run in, side by side.
JOBS ?= 2
# Of each kernel the gate of NVIDIA's architectures compiles one in so many cases: `make compile-gate-cuda CUDA_EVERY=3`.
CUDA_EVERY ?= 1
# The same for the Ascend gate; with each tile in any case, and of older compilers too: tests/npu/test_ascend_compile.py.
NPU_EVERY ?= 1
# Of tests of many cases alike some run (tests/support/sampled.py), and one in so many cases of all others.
TEST_EVERY ?= 1
export DIYFA_TEST_EVERY := $(TEST_EVERY)
# The slowest first, so that all processes end together. sm_86 has the tiles, limits and instructions of sm_89 but for
# float8: `make compile-gate-cuda CUDA_TARGETS=sm_86` compiles it, and so does a test for some kernels.
CUDA_TARGETS ?= sm_90 sm_120 sm_100 sm_80 sm_89 sm_75

# What runs on npu tensors; everything else does not depend on the environment.
NPU_TESTS ?= tests/npu tests/numerics/test_attention_matrix.py tests/numerics/test_propagation.py \
  tests/numerics/test_empty_blocks.py tests/numerics/test_score_functions.py \
  tests/numerics/test_kvcache_matrix.py tests/numerics/test_hidden_pages.py tests/numerics/test_infinite_sinks.py \
  tests/numerics/test_infinite_scores.py tests/numerics/test_eight_bits.py tests/frontend/test_device.py \
  tests/frontend/test_wrong_lengths.py tests/numerics/test_merge.py tests/tools/test_cli.py

# What depends on the release of torch_npu.
NPU_OLDEST_TESTS ?= tests/npu/test_torch_npu.py tests/npu/test_npu_on_shim.py tests/frontend/test_npu_environment.py \
  tests/frontend/test_npu_stacks.py --deselect tests/npu/test_torch_npu.py::test_peak_memory

# What depends on the version of Triton.
TRITON_FORMS ?= sm90 bfloat16 D=64 full
TRITON_TESTS ?= tests/cuda $(addprefix tests/hopper/, test_gluon_compat.py test_gluon_interpreter.py \
  test_hopper_bwd.py test_hopper_interpreted.py test_hopper_ptx.py test_hopper_synchronisation.py test_hopper_tutorial.py \
  test_tile_counter.py) \
  tests/numerics/test_attention_matrix.py tests/numerics/test_matmul.py \
  tests/numerics/test_merge.py tests/numerics/test_dropout_kernels.py tests/frontend/test_ops.py tests/numerics/test_fuzz.py

# What needs a client; the rest of the folder does not.
INTEGRATION_TESTS ?= $(addprefix tests/integrations/, test_transformers.py test_diffusers.py test_hub_kernel.py test_guide.py)

.PHONY: help demo test test-all test-rest test-browser report-libraries lint format compile-gate compile-gate-cuda compile-gate-npu small-pack test-npu test-npu-oldest test-integrations stubs tables docs dist course clean

help:
	@sed -n '3,21s/^#   //p' Makefile

# --- environments ---------------------------------------------------------------------------------------------------

# $(1): the environment's folder
define install_torch
	@test -n "$(PYTHON)" || { echo "Python 3.10 to 3.14 is needed: make ... PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(1)
	@echo "--- $(1): PyTorch, about $(TORCH_SIZE) to download: pip install $(TORCH_INSTALL)"
	@$(1)/bin/python -m pip install -q $(TORCH_INSTALL) || { \
	  echo >&2; \
	  echo "PyTorch did not install. No NVIDIA GPU was found, so its CPU build was asked for ($(TORCH_INSTALL))." >&2; \
	  echo "Where your package index does not have that, name another source, for example PyTorch's CPU index:" >&2; \
	  echo "  make ... TORCH_INSTALL='torch==$(TORCH_VERSION) --index-url <address on pytorch.org/get-started>'" >&2; \
	  exit 1; }
endef

$(VENV)/.torch:
	$(call install_torch,$(VENV))
	touch $@

$(VENV)/.ready: $(VENV)/.torch pyproject.toml
	@echo "--- $(VENV): diyfa from this folder, its command line, tests and plots$(if $(TRITON_INSTALL),; $(TRITON_INSTALL)), about $(DIYFA_SIZE) to download"
	$(VENV)/bin/python -m pip install -q $(TRITON_INSTALL) -e '.[cli,test,plot,report]'
	touch $@

$(VENV)/.lint: $(VENV)/.ready
	$(VENV)/bin/python -m pip install -q -e '.[lint]'
	touch $@

$(VENV)/.course: $(VENV)/.ready
	$(VENV)/bin/python -m pip install -q -e '.[course]'
	touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(VENV)/bin/python -m pip install -q -e '.[docs]'
	touch $@

$(VENV)/.dist: $(VENV)/.ready
	$(VENV)/bin/python -m pip install -q -e '.[dist]'
	touch $@

# triton-ascend installs a package named triton, so it cannot share an environment with NVIDIA's.
$(VENV_NPU)/.torch:
	$(call install_torch,$(VENV_NPU))
	touch $@

$(VENV_NPU)/.ready: $(VENV_NPU)/.torch pyproject.toml
	$(VENV_NPU)/bin/python -m pip install -q torch_npu==$(TORCH_VERSION) $(TRITON_ASCEND_INSTALL) -e '.[npu,npu-compile,cli,test]'
	touch $@

# Most indices have so old a torch for x86 as a CUDA build alone; its gigabytes of libraries are not needed.
$(VENV_NPU_OLDEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV_NPU_OLDEST)
	$(VENV_NPU_OLDEST)/bin/python -m pip install -q --no-deps torch==$(OLDEST_TORCH) torch_npu==$(OLDEST_TORCH_NPU)
	$(VENV_NPU_OLDEST)/bin/python tests/support/torch_without_cuda.py
	$(VENV_NPU_OLDEST)/bin/python -m pip install -q $(TRITON_ASCEND_INSTALL) -e '.[npu,cli,test]'
	touch $@

# Only Triton differs, so it is laid over the first environment.
.PRECIOUS: $(CACHE)/triton%/.ready
$(CACHE)/triton%/.ready: $(VENV)/.ready
	rm -rf $(@D)
	$(VENV)/bin/python -m pip install -q --no-deps --target $(@D) 'triton==$*.*'
	touch $@

# What tests/integrations runs diyfa inside, laid over the first environment: none of it brings a PyTorch.
INTEGRATIONS_INSTALL ?= 'transformers==5.17.*' 'diffusers==0.42.*' 'kernels==0.17.*' 'numpy<2.4'
$(CACHE)/integrations/.ready: $(VENV)/.ready
	rm -rf $(@D)
	$(VENV)/bin/python -m pip install -q --target $(@D) $(INTEGRATIONS_INSTALL)
	touch $@

# On a device CANN's compiler compiles, which is mostly older than the newest on PyPI: CANN 8.5.0's is 1.0.0, CANN
# 9.0.0's 1.1.0. The gate takes them too.
.PRECIOUS: $(CACHE)/ascendnpu-ir-%/.ready
$(CACHE)/ascendnpu-ir-%/.ready: $(VENV_NPU)/.ready
	rm -rf $(@D)
	$(VENV_NPU)/bin/python -m pip install -q --no-deps --target $(@D) ascendnpu-ir==$*
	touch $@

# --- what to run ----------------------------------------------------------------------------------------------------

demo: $(VENV)/.ready
	$(VENV)/bin/diyfa demo $(DEMO_ARGS)

test: $(VENV)/.ready
	$(VENV)/bin/python -m pytest -m 'quick and not slow' --numprocesses $(JOBS) $(PYTEST_ARGS)

test-all: $(VENV)/.ready
	$(VENV)/bin/python -m pytest --numprocesses $(JOBS) $(PYTEST_ARGS)

# What `make test-all` runs and `make test` does not.
test-rest: $(VENV)/.ready
	$(VENV)/bin/python -m pytest -m 'not quick and not slow' --numprocesses $(JOBS) $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	cd tests/support && $(abspath $(VENV))/bin/mypy --config-file $(CURDIR)/pyproject.toml typed_user.py  # as installed

format: $(VENV)/.lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

compile-gate: compile-gate-cuda compile-gate-npu

compile-gate-cuda: $(VENV)/.ready
	printf '%s\n' $(CUDA_TARGETS) | COLUMNS=140 xargs -P $(JOBS) -I{} $(VENV)/bin/diyfa compile {} --every $(CUDA_EVERY)

# `diyfa compile CHIP` prints the same for one chip; the tests also check that the gate catches what it must. Then what the
# compiler made of the kernels runs on this CPU.
compile-gate-npu: export DIYFA_ASCENDNPU_IR := $(CURDIR)/$(CACHE)/ascendnpu-ir-1.1.0:$(CURDIR)/$(CACHE)/ascendnpu-ir-1.0.0
compile-gate-npu: export DIYFA_GATE_EVERY := $(NPU_EVERY)
compile-gate-npu: $(VENV_NPU)/.ready $(CACHE)/ascendnpu-ir-1.1.0/.ready $(CACHE)/ascendnpu-ir-1.0.0/.ready
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(VENV_NPU)/bin/python -m pytest tests/npu/test_ascend_compile.py \
	  --numprocesses $(JOBS) $(PYTEST_ARGS)
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 TRITON_INTERPRET=0 $(VENV_NPU)/bin/python -m pytest \
	  tests/npu/test_compiled_numerics.py --numprocesses $(JOBS) $(PYTEST_ARGS)

small-pack: export DIYFA_CACHE_DIR := $(CURDIR)/$(CACHE)/pack
small-pack: $(VENV)/.ready
	$(VENV)/bin/diyfa pack sm_90 --only merge --jobs $(JOBS) --out $(CACHE)/pack
	$(VENV)/bin/python tests/tools/pack_coverage.py sm_90

# The real torch_npu on host memory; the launcher builds what stands in for CANN. The compile gate is a target of its own.
test-npu: $(VENV_NPU)/.ready
	$(VENV_NPU)/bin/python tests/support/npu_env.py $(NPU_TESTS) -k 'not [cpu-' --numprocesses $(JOBS) \
	  --ignore=tests/npu/test_ascend_compile.py --ignore=tests/npu/test_compiled_numerics.py $(PYTEST_ARGS)

test-npu-oldest: $(VENV_NPU_OLDEST)/.ready
	$(VENV_NPU_OLDEST)/bin/python tests/support/npu_env.py $(NPU_OLDEST_TESTS) --numprocesses $(JOBS) $(PYTEST_ARGS)

# `make test-triton3.7` takes Triton 3.7, TRITON_FORMS='' compiles every kernel.
test-triton%: $(CACHE)/triton%/.ready
	PYTHONPATH='$(CURDIR)/$(CACHE)/triton$*' COLUMNS=140 $(VENV)/bin/diyfa compile sm_90 --only '$(TRITON_FORMS)'
	PYTHONPATH='$(CURDIR)/$(CACHE)/triton$*' $(VENV)/bin/python -m pytest $(TRITON_TESTS) -k 'not [cpu-' --numprocesses $(JOBS) $(PYTEST_ARGS)

test-integrations: $(CACHE)/integrations/.ready
	PYTHONPATH='$(CURDIR)/$(CACHE)/integrations' $(VENV)/bin/python -m pytest $(INTEGRATION_TESTS) --numprocesses $(JOBS) $(PYTEST_ARGS)

# Playwright drives the Chromium of the system, which is not installed here. DIYFA_SHOTS=FOLDER keeps the screenshots.
$(CACHE)/browser/.ready: $(VENV)/.ready
	rm -rf $(@D)
	$(VENV)/bin/python -m pip install -q --target $(@D) 'playwright>=1.50'
	touch $@

CHROMIUM := $(shell command -v chromium chromium-browser google-chrome | head -1)
ifneq ($(CHROMIUM),)
test-browser: $(CACHE)/browser/.ready
	PYTHONPATH='$(CURDIR)/$(CACHE)/browser' $(VENV)/bin/python -m pytest tests/tools/test_report_browser.py $(PYTEST_ARGS)
else
test-browser:
	@echo "--- no Chromium here, so no browser tests: apt-get install chromium fonts-noto-cjk"
endif

# The libraries that the page has inside, from the npm registry; vendor/README.md has their licences.
VENDOR := diyfa/lab/report/vendor
report-libraries:
	mkdir -p $(CACHE)/npm
	cd $(CACHE)/npm && npm pack --silent echarts@6.1.0 tabulator-tables@6.5.3
	tar -xzOf $(CACHE)/npm/echarts-6.1.0.tgz package/dist/echarts.min.js > $(VENDOR)/echarts.min.js
	tar -xzOf $(CACHE)/npm/tabulator-tables-6.5.3.tgz package/dist/js/tabulator.min.js > $(VENDOR)/tabulator.min.js
	tar -xzOf $(CACHE)/npm/tabulator-tables-6.5.3.tgz package/dist/css/tabulator.min.css > $(VENDOR)/tabulator.min.css

stubs: $(VENV)/.ready
	$(VENV)/bin/python tests/tools/stubs.py

tables: $(VENV)/.ready
	$(VENV)/bin/python tests/tools/feature_tables.py
	$(VENV)/bin/python tests/tools/speed_tables.py

SPHINX = $(VENV)/bin/sphinx-build -q -W --keep-going -j $(JOBS) -c docs
docs: export TORCH_DEVICE_BACKEND_AUTOLOAD := 0
docs: $(VENV)/.docs
	$(SPHINX) -d $(CACHE)/doctrees/en docs site
	$(SPHINX) -d $(CACHE)/doctrees/zh -t zh docs/zh site/zh
	test ! -e tests/tools/course.py || $(VENV)/bin/python tests/tools/course.py notebooks site/notebooks

dist: $(VENV)/.dist
	rm -rf dist build
	$(VENV)/bin/python -m build --outdir dist .
	$(VENV)/bin/twine check --strict dist/*
	$(VENV)/bin/python tests/tools/distribution.py dist

course: $(VENV)/.course
	$(VENV)/bin/python tests/tools/course.py run
	$(VENV)/bin/python tests/tools/course.py notebooks notebooks

clean:
	rm -rf $(VENV) $(VENV_NPU) $(VENV_NPU_OLDEST) $(CACHE) site dist build notebooks
