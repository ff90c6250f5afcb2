# Needs python3 (3.11 or newer, with venv) and make; everything else goes into .venv.
PYTHON ?= python3
# Not `?=`: a shell may export the VENV of another project. `make setup VENV=folder` names another folder.
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 200
MINUTES ?= 30
FAULTS ?=
SECONDS ?= 600
BODIES ?= 1000000
SEED ?=
FUZZ ?=
NAMES ?=
PEERS ?=
ROWS ?=
BASE ?=
BOUND ?=
GPU_FLAGS ?=

.PHONY: help setup setup-dev run test test-near test-deep test-turn test-long bench pictures lint mutants mutants-sampled mutants-arguments sim soak fuzz bodies drill clients test-gpu bench-gpu test-gpu-pair gpu-pack test-cuda-build clean
.DEFAULT_GOAL := help

help:
	@echo "make run        set up, then serve on http://127.0.0.1:8000 (router, one prefill node, one decode node)"
	@echo "make test-near  lint and the tests nearest to what you changed; about a minute. BASE=main: all of a branch; BOUND=300"
	@echo "make test       set up, then lint and the tests that notice most per second; twelve minutes"
	@echo "make test-deep  the next ones; seventeen minutes. CI runs both"
	@echo "make test-turn  a twentieth of those that wait, another each hour, as CI; TURN=7 takes that one"
	@echo "make test-long  hours: costly variants, more seeds, all ranks, fuzzing, mutated bodies, kernels, soaking, mutants"
	@echo "make setup      the environment in $(VENV) only"
	@echo "make setup-dev  the same, with what tests, lint and benches need; they ask for it themselves"
	@echo "make lint       style, types, layers, mutants that fit, prose"
	@echo "make bench      measure, beside transformers; PEERS=1: beside llama.cpp and vLLM, built into build/peers; ROWS=decode,server"
	@echo "make pictures   README's pictures, from a real run"
	@echo "make mutants    take safety away piece by piece; a named test must fail each time"
	@echo "make mutants-sampled   150 changes drawn by seed where nothing may break silently; 85 % must be noticed"
	@echo "make mutants-arguments 300 wrong arguments drawn by seed over routers, nodes, wire, scheduler; 90 % must be noticed"
	@echo "make sim        the whole cluster simulated under faults, SEEDS=1000 random lives; says how to replay a failure"
	@echo "make soak       load for MINUTES=30; memory, descriptors, threads must stay flat; FAULTS=--faults kills nodes meanwhile"
	@echo "make fuzz       hostile nodes, tickets, outsiders and HTTP for SECONDS=600; nobody may end, trip or leak; SEED=n FUZZ='--mode http'"
	@echo "make bodies     BODIES=1000000 mutated request bodies; no 5xx, nothing hangs, memory stays flat; SEED=n"
	@echo "make drill      hosts as network namespaces: cables pulled, hosts frozen and killed under load; root, Linux, iproute2"
	@echo "make clients    clients that others wrote against a running Baton; installs gigabytes into build; NAMES='openai llm'"
	@echo "make test-gpu   on a GPU machine, network or none: is it right there? At most ten minutes; into build/gpu/cuda"
	@echo "make bench-gpu  the same, how fast is it? At the shapes of 0.6B and 8B models; at most four minutes"
	@echo "make test-gpu-pair   on a machine with two GPUs: hand-offs between them, one node over both"
	@echo "make gpu-pack   what a GPU machine without network lacks: packages, a model in parts; into build/gpu-pack"
	@echo "make test-cuda-build   torch's CUDA build without a driver: shapes, devices, hidden waits; 2.6 GB, not in CI"
	@echo "make clean      remove what building and testing left (not $(VENV))"

setup:
	@$(PYTHON) deploy/setup_env.py --venv $(VENV)

setup-dev:
	@$(PYTHON) deploy/setup_env.py --venv $(VENV) --extras dev load models otel ray

run: setup
	@exec $(BIN)/baton up --host 127.0.0.1 --port 8000

test: setup-dev
	@$(BIN)/python tests/tiers.py test

test-near: setup-dev
	@$(BIN)/python tests/mutants/near.py $(if $(BASE),--base $(BASE)) $(if $(BOUND),--bound $(BOUND))

test-deep: setup-dev
	@$(BIN)/python tests/tiers.py deep

test-turn: setup-dev
	@$(BIN)/python tests/tiers.py turn $(TURN)

test-long: setup-dev
	@$(BIN)/python tests/tiers.py long

lint: setup-dev
	@$(BIN)/python tests/tiers.py lint

bench: setup-dev
	@$(BIN)/python -m $(if $(PEERS),benchmarks.peers.run --rows '$(ROWS)',benchmarks.run)

pictures: setup-dev
	@$(BIN)/python -m benchmarks.pictures

mutants: setup-dev
	@$(BIN)/python tests/mutants/run.py

mutants-sampled: setup-dev
	@$(BIN)/python tests/mutants/sampled.py

mutants-arguments: setup-dev
	@$(BIN)/python tests/mutants/sampled.py --arguments

sim: setup-dev
	@$(BIN)/python -m tests.support.sim.run --seeds $(SEEDS)

soak: setup-dev
	@$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES) $(FAULTS)

fuzz: setup-dev
	@$(BIN)/python -m tests.chaos.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(FUZZ)

bodies: setup-dev
	@$(BIN)/python -m tests.chaos.bodies --bodies $(BODIES) $(if $(SEED),--seed $(SEED))

drill: setup-dev
	@$(BIN)/python tests/tiers.py drill

clients: setup-dev
	@$(BIN)/python -m tests.clients.run $(NAMES)

# No setup: a GPU machine brings the torch that fits its driver, and may have no network. PYTHON=... names its Python.
test-gpu:
	@$(PYTHON) -m tests.gpu.run right served $(GPU_FLAGS)

bench-gpu:
	@$(PYTHON) -m tests.gpu.run fast $(GPU_FLAGS)

test-gpu-pair:
	@$(PYTHON) -m tests.gpu.run pair $(GPU_FLAGS)

gpu-pack: setup
	@$(BIN)/python -m tests.gpu.pack

test-cuda-build:
	@$(PYTHON) tests/gpu/cuda_build.py

clean:
	rm -rf build dist bench-out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
