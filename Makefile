# One target for each habit. ARGS reaches the program that a target runs: make demo ARGS="--steps 20".
# PYTHON picks the interpreter that VENV is made with: make setup test PYTHON=/path/to/python3.13
# Without it an environment stays with the one it has, and a new one gets the newest supported one that is found.

VENV   ?= .venv
ifndef PYTHON
PYTHON := $(or $(wildcard $(VENV)/bin/python),$(shell .ci/find-python),python3)
endif
ARGS   ?=
MINUTES ?= 20
JOBS   ?= 2
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# What .venv was installed from. Any change installs again; another interpreter makes .venv anew.
INTERPRETER := import sys; print(sys.base_prefix, sys.version.split()[0])
INSTALLED_FROM = "$$("$(PYTHON)" -c '$(INTERPRETER)') $(CURDIR) $$(cksum < pyproject.toml)"

.PHONY: help setup demo test check fmt layout golden pictures fuzz bench bench-peers bench-plots bench-compile paper test-ssh test-net soak
.NOTPARALLEL:

help:
	@echo "to begin with:"
	@echo "make demo    train a small GPT through a pipeline of two processes (ARGS=--help lists its options)"
	@echo "make setup   make .venv and install into it, with the newest supported Python that is found (PYTHON=... another,"
	@echo "             VENV=... elsewhere); the others do this when needed"
	@echo "make docs    build the documentation into build/docs/index.html, and run its notebooks (some minutes;"
	@echo "             in an environment of their own, some 200 MB)"
	@echo "make test    run the tests, two files at a time (ARGS goes to pytest; JOBS=0 runs them in one process)"
	@echo "make paper   predict the paper's table, on up to 1,024 GPUs, from compiled steps: some minutes, no GPU"
	@echo "             (ARGS=--rows-only: the table alone); results/paper.json, pictures in docs/images"
	@echo "make test-gpu  tests on a GPU that actors share: transports on its memory, numerics (see docs/gpu.md)"
	@echo "make bench-gpu  those, then transfers and a training step on it (ARGS=\"--platform cpu --small\": without one)"
	@echo
	@echo "to change the code:"
	@echo "make check   lint, format, types, import rules"
	@echo "make fmt     format the code"
	@echo "make layout  count modules, lines, names and long lines: the rules that tests/test_layout.py asserts"
	@echo "make golden  rewrite the golden texts of tests/golden and the pictures of tests/view/golden; read the diff"
	@echo "make pictures  measure a step of four actors, and draw it: pictures of README.md and docs/page.md (docs/images)"
	@echo "make test-ssh  tests of actors over ssh, with an sshd of their own on a loopback port (Debian: installs openssh-server)"
	@echo "make test-browser  tests of pages in headless Chromium (Debian: installs chromium)"
	@echo "make test-net  tests with network namespaces as hosts: links that are cut, slow, or firewalled (as root, on Linux)"
	@echo "make test-contracts  what the code and its stand-ins call of CuPy, nccl4py and NCCL, held against the real ones;"
	@echo "             in an environment of their own (some 1 GB), without a GPU"
	@echo "make soak    train for MINUTES=20 while actors are killed, stopped and cut off (ARGS=--help lists its options);"
	@echo "             as root, on Linux, with network namespaces as hosts: their links are cut as well (ARGS=--local: not)"
	@echo "make fuzz    draw random training steps and compare them with plain JAX (ARGS=\"--examples 20000\")"
	@echo "make fuzz-protocol  attack the control protocol with mutated frames (ARGS=\"--frames 1000000\")"
	@echo "make fuzz-transport  offers, copies, wrong sizes and aborts among UCX transports, at random (ARGS=\"--minutes 20\")"
	@echo "make bench   measure and compare with the targets (ARGS=\"tiny_step big_step\" these parts; ARGS=--show the last)"
	@echo "make bench-peers  the same beside PyTorch, Ray and Monarch, in an environment of their own (some 2 GB);"
	@echo "             PEERS_PIP_ARGS reaches its pip, for one: --extra-index-url and PyTorch's index of builds for CPUs"
	@echo "make bench-plots  draw the last results of bench and bench-peers (benchmarks/results/*.svg)"
	@echo "make bench-compile  time the compiler, pass by pass (ARGS=--help lists its options)"

setup:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "setup: there is no '$(PYTHON)'; name an interpreter: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "setup: $(PYTHON) is $$("$(PYTHON)" -V 2>&1), but Python 3.11 or newer is needed:" \
	       "make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@if [ "$$(cat $(STAMP) 2>/dev/null)" != $(INSTALLED_FROM) ]; then $(MAKE) --no-print-directory .install; fi
ifneq ($(filter setup,$(MAKECMDGOALS)),)
	@echo "setup: $(VENV) has $$($(BIN)/python -V)"
	@newest=$$(.ci/find-python) && $(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] >= \
	  tuple(map(int, sys.argv[1].split()[1].split(".")[:2])))' "$$("$$newest" -V)" && \
	  echo "setup: $$("$$newest" -V) is here as well: make setup PYTHON=$$newest" || true
endif

.PHONY: .install
.install:
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "setup: $(PYTHON) cannot make virtual environments (no ensurepip);" \
	       "on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@rm -f $(STAMP)
	@# sys._base_executable: with .venv activated, $(PYTHON) is .venv's own, which --clear would pull from under us.
	@if [ "$$($(BIN)/python -c '$(INTERPRETER)' 2>/dev/null)" != "$$("$(PYTHON)" -c '$(INTERPRETER)')" ]; then \
	  base=$$("$(PYTHON)" -c 'import sys; print(sys._base_executable)') && \
	  echo "setup: making $(VENV) with $$base ($$("$$base" -V))" && "$$base" -m venv --clear $(VENV); fi
	@echo "setup: installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,dev]'
	@echo $(INSTALLED_FROM) > $(STAMP)

demo: setup
	@$(BIN)/python examples/train_gpt.py $(ARGS)

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Installs Debian packages whose commands are missing, where that is possible: $(call installed,command:package ...)
SBIN := PATH="$$PATH:/usr/sbin:/sbin"
installed = missing=; for pair in $(1); do \
	    $(SBIN) command -v "$${pair%%:*}" >/dev/null || missing="$$missing $${pair\#\#*:}"; done; \
	  if [ -n "$$missing" ]; then \
	    if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	      echo "$@: missing here, on Debian and Ubuntu: sudo apt-get install$$missing" >&2; exit 1; fi; \
	    echo "$@: installing$$missing"; export RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive; \
	    install="apt-get install -y -qq --no-install-recommends $$missing"; \
	    $$install >/dev/null 2>&1 || { apt-get update -qq && $$install >/dev/null; } || { \
	      echo "$@: could not be installed:$$missing" >&2; exit 1; }; fi

# Needs no rights but to install sshd where it is missing; the tests start theirs themselves, with throwaway keys.
test-ssh: setup
	@$(call installed,sshd:openssh-server ssh:openssh-client)
	JAXPP_TEST_SSH=1 $(BIN)/python -m pytest tests/launch/test_ssh.py $(ARGS)

# Hosts are network namespaces. What uses them runs in a namespace of its own, so this machine's network is never
# touched, with a /sys that shows it (UCX looks for devices there): $(call in_net_room,command ...)
# Where that cannot be, it runs outside, and says why it does less: each test is skipped, the soak cuts no links.
NET_ROOM := unshare --net --mount sh -c 'mount -t sysfs sysfs /sys && ip link set lo up && exec "$$@"' sh
NET_COMMANDS := sshd:openssh-server ssh:openssh-client ip:iproute2 tc:iproute2 nft:nftables unshare:util-linux
net_installed = if [ "$$(id -u)" = 0 ]; then $(call installed,$(NET_COMMANDS)); fi
in_net_room = export $(SBIN); if $(NET_ROOM) true 2>/dev/null; \
	then JAXPP_TEST_NET=inside $(NET_ROOM) $(1); else JAXPP_TEST_NET=outside $(1); fi

# Pages in a real browser; without Chromium their tests are skipped.
.PHONY: test-browser
test-browser: setup
	@$(call installed,chromium:chromium)
	JAXPP_TEST_BROWSER=1 $(BIN)/python -m pytest -rs tests/view/test_pages_in_browser.py tests/integration/test_page.py $(ARGS)

test-net: setup
	@$(net_installed)
	@$(call in_net_room,$(BIN)/python -m pytest -rs tests/integration/test_network_faults.py $(ARGS))

soak: setup
ifeq ($(filter --local,$(ARGS)),)
	@($(net_installed)) || true
	@$(call in_net_room,$(BIN)/python tests/soak --minutes $(MINUTES) $(ARGS))
else
	@$(BIN)/python tests/soak --minutes $(MINUTES) $(ARGS)
endif

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

fmt: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

layout: setup
	@PYTHONPATH=tests/support $(BIN)/python tests/support/layout.py

golden: setup
	$(BIN)/python -m pytest tests/golden tests/view/test_golden_pictures.py --golden $(ARGS)

pictures: setup
	@$(BIN)/python docs/step_picture.py $(ARGS)

fuzz: setup
	@$(BIN)/python tests/fuzz $(ARGS)

.PHONY: fuzz-protocol
fuzz-protocol: setup
	@$(BIN)/python tests/protocol_fuzz $(ARGS)

.PHONY: fuzz-transport
fuzz-transport: setup
	@$(BIN)/python tests/transport_fuzz $(ARGS)

bench: setup
	@$(BIN)/python benchmarks/bench.py $(ARGS)

# The peers' environment: made like .venv, with .venv's interpreter. Only the programs of benchmarks/peers run in it.
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
PEERS_LIST := benchmarks/peers/requirements.txt
PEERS_PIP_ARGS ?=
PEERS_FROM = "$$("$(BIN)/python" -c '$(INTERPRETER)') $(CURDIR) $$(cksum < $(PEERS_LIST))"

bench-peers: setup
	@if [ "$$(cat $(PEERS_STAMP) 2>/dev/null)" != $(PEERS_FROM) ]; then $(MAKE) --no-print-directory .install-peers; fi
	@$(BIN)/python benchmarks/bench.py --peers $(ARGS)

.PHONY: .install-peers
.install-peers:
	@rm -f $(PEERS_STAMP)
	@if [ "$$($(PEERS)/bin/python -c '$(INTERPRETER)' 2>/dev/null)" != "$$($(BIN)/python -c '$(INTERPRETER)')" ]; then \
	  base=$$($(BIN)/python -c 'import sys; print(sys._base_executable)') && \
	  echo "bench-peers: making $(PEERS) with $$base" && "$$base" -m venv --clear $(PEERS); fi
	@echo "bench-peers: installing the peers into $(PEERS) (some minutes the first time)"
	@# No stamp where one is missing: it is tried again the next time. Measuring goes on, and the results say what failed.
	@all=yes; for peer in $$(grep -v '^#' $(PEERS_LIST)); do \
	    $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check $(PEERS_PIP_ARGS) "$$peer" || { \
	      all=no; echo "bench-peers: $$peer cannot be installed here; measuring goes on without it" >&2; }; done; \
	  if [ $$all = yes ]; then echo $(PEERS_FROM) > $(PEERS_STAMP); fi

# What the code and its stand-ins call of CuPy, nccl4py and NCCL, held against the real ones, which need no GPU for
# that: in an environment of their own, which also sees what .venv has.
.PHONY: test-contracts
CONTRACTS := .venv-contracts
CONTRACTS_LIST := 'cupy-cuda13x>=13.6' 'nccl4py>=0.6' nvidia-nccl-cu13
CONTRACTS_FROM = "$$("$(BIN)/python" -c '$(INTERPRETER)') $(CURDIR)" $(CONTRACTS_LIST)
test-contracts: setup
	@if [ "$$(cat $(CONTRACTS)/.installed 2>/dev/null)" != "$$(echo $(CONTRACTS_FROM))" ]; then \
	  echo "test-contracts: installing CuPy, nccl4py and NCCL into $(CONTRACTS) (some 700 MB)" && \
	  "$$($(BIN)/python -c 'import sys; print(sys._base_executable)')" -m venv --clear $(CONTRACTS) && \
	  $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	    "$$($(CONTRACTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth" && \
	  $(CONTRACTS)/bin/python -m pip install --quiet --disable-pip-version-check $(CONTRACTS_LIST) && \
	  echo $(CONTRACTS_FROM) > $(CONTRACTS)/.installed; fi
	CUDA_VISIBLE_DEVICES= JAXPP_TEST_CONTRACTS=1 $(CONTRACTS)/bin/python -m pytest -rs tests/gpu/test_contracts.py $(ARGS)

# The site: Sphinx in an environment of its own, which also sees what .venv has. Any warning is an error.
.PHONY: docs
DOCS := .venv-docs
DOCS_LIST = $(BIN)/python -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))\
["project"]["optional-dependencies"]["docs"]))'
DOCS_FROM = "$$("$(BIN)/python" -c '$(INTERPRETER)') $(CURDIR) $$($(DOCS_LIST) | cksum)"
docs: setup
	@if [ "$$(cat $(DOCS)/.installed 2>/dev/null)" != $(DOCS_FROM) ]; then \
	  echo "docs: installing Sphinx into $(DOCS)" && \
	  "$$($(BIN)/python -c 'import sys; print(sys._base_executable)')" -m venv --clear $(DOCS) && \
	  $(DOCS_LIST) > $(DOCS)/requirements.txt && \
	  $(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r $(DOCS)/requirements.txt && \
	  $(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$($(DOCS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth" && \
	  echo $(DOCS_FROM) > $(DOCS)/.installed; fi
	@# Where it fails nothing is kept: a page that is not read again would not warn again.
	@echo "docs: building the site, and running the tutorials on processes of this machine: some minutes, silent if all goes well"
	@$(DOCS)/bin/python -m sphinx -W --keep-going -n -q -d build/doctrees $(ARGS) docs build/docs || { \
	  rm -rf build/doctrees; exit 1; }
	@echo "docs: open build/docs/index.html"

# On a machine with a GPU, with jaxpp-async[cuda13] (or [cuda12]) installed into .venv. See docs/gpu.md.
.PHONY: test-gpu bench-gpu
GPU_TESTS := tests/gpu/test_on_gpu.py tests/gpu/test_on_gpu_nccl.py
test-gpu: setup
	JAXPP_TEST_GPU=cuda $(BIN)/python -m pytest -rs $(GPU_TESTS) $(ARGS)

bench-gpu: setup
	@$(BIN)/python benchmarks/gpu.py $(ARGS)

plots_installed = $(BIN)/python -c 'import matplotlib' 2>/dev/null || { \
	  echo "$@: installing what draws"; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'; }

bench-plots: setup
	@$(plots_installed)
	@$(BIN)/python benchmarks/plots.py $(ARGS)

paper: setup
	@$(plots_installed)
	@$(BIN)/python benchmarks/paper_table.py $(ARGS)

bench-compile: setup
	@$(BIN)/python benchmarks/compile.py $(ARGS)
