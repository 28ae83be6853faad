# `make compare`, `test`, `lint`, `notebooks`, `fuzz`, `pairs`, `operators` and `mutants` each do their
# own set-up on a fresh machine: `compare` installs what the comparison needs, each of the others
# everything.
# It needs python3 (3.11 or later) and is repeated only when what is installed changes.

python := .venv/bin/python
installed := .venv/.installed
# `make gpu PYTHON=python3` takes a python as it is: on a machine with a GPU and no network, say
ifeq ($(origin PYTHON),command line)
python := $(PYTHON)
installed :=
endif

.PHONY: compare test test-avx2 package lint notebooks check-notebooks fuzz pairs operators mutants oldest newest test-device gpu gpu-page clean

compare: .venv/.compare
	$(python) test_memory_optimized.py

# two processes with a thread each, a file's tests by the same: kernels of two threads in both would
# wait for one another
test: .venv/.installed
	OMP_NUM_THREADS=1 $(python) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# what goes by the device, on the software accelerator: a process has one, so that these run in one
# of their own; DEVICE=cuda, xpu, ... for one that is here
DEVICE ?= soft
ON_DEVICE = tests/accelerator tests/engine/test_generators.py tests/engine/test_executor.py \
	tests/engine/test_host_memory.py \
	tests/engine/test_recompute.py tests/engine/test_replay.py tests/engine/test_replay_check.py \
	tests/engine/test_nondeterministic_kernels.py tests/engine/test_kernel_segments.py \
	tests/engine/pitfalls/test_randomness.py tests/engine/pitfalls/test_statistics.py \
	tests/test_groups.py
test-device: $(installed)
	OMP_NUM_THREADS=1 $(python) -m pytest -p no:benchmark --device $(DEVICE) $(ON_DEVICE)

# measures there, in parts that each stop after some minutes on a GPU, and goes on where it stopped:
# make gpu DEVICE=cuda PART=speed; without it tests, families, budgets, speed, graphs, batches and offload.
# On the software accelerator models are small, nothing stops, and the page is build/gpu.md
SECONDS = 170
here = PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH}
ROWS = build/gpu-$(DEVICE).jsonl
gpu: $(installed)
	$(here) $(python) benchmarks/gpu.py $(PART) --device $(DEVICE) --rows $(ROWS) \
		--tests "$(ON_DEVICE)" $(if $(COMMIT),--commit "$(COMMIT)") \
		$(if $(filter soft,$(DEVICE)),--fresh,--seconds $(SECONDS))
	$(if $(filter soft,$(DEVICE)),$(here) $(python) docs/gpu.py $(ROWS) --to build/gpu.md)

# docs/gpu.md from the rows that are there; ROWS=build/gpu-cuda.jsonl takes those of a run over first
gpu-page: $(installed)
	$(here) $(python) docs/gpu.py $(if $(filter command line,$(origin ROWS)),$(ROWS))

# a part of them, on any processor as on one whose instructions end with AVX2: oneDNN then chooses
# other kernels, which take other workspaces, and has none for some types
test-avx2: .venv/.installed
	ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 $(python) -m pytest -n 2 --dist loadfile \
		test_memory_optimized.py tests/harness/test_worker.py tests/profiling/test_peak_memory.py \
		tests/profiling/test_memory_tracker.py tests/models/test_lstm.py tests/models/test_vnet.py tests/policy/test_least.py \
		tests/policy/test_budget.py

# the wheel in an empty environment, with the newest of all that it asks for and no constraints
package: .venv/.installed
	ZOO_PACKAGE=1 $(python) -m pytest --timeout 1800 tests/test_packaging.py

lint: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# runs each notebook in both languages from a fresh kernel, and writes it; ONLY="01 02" for some
notebooks: .venv/.installed
	$(python) -m notebooks.build $(ONLY)

# runs the English ones and writes none: those in Chinese have the same code, which a test holds
check-notebooks: .venv/.installed
	$(python) -m notebooks.build --check

# random models by random budgets, so many of them, and by random plans: at least 2,000 and at least
# so many minutes
MINUTES ?= 10
BUDGETS ?= 200
fuzz: .venv/.installed
	$(python) -m tests.fuzz --minutes $(MINUTES) --budgets $(BUDGETS)

# each operator of torch's own database, with and without a recording; prints the table
operators: .venv/.installed
	$(python) -m tests.operators

# planned modules in front of one another, all kinds by all options; MINUTES=10 for so long
pairs: .venv/.installed
	$(python) -m tests.pairs $(if $(filter command line,$(origin MINUTES)),--minutes $(MINUTES))

# functions of the engine are broken by rule, one at a time; their tests must notice
mutants: .venv/.installed
	$(python) -m tests.mutants

# tests that need no extras, on the oldest and on the newest torch that setup.cfg admits, with what
# `pip install .` brings and nothing else; then the device's, whose programs use NumPy and hypothesis
BARE ?= tests/policy/test_decision.py tests/tracing/test_exact.py \
	tests/tracing/test_engines.py tests/tracing/test_graphs_in_front.py tests/profiling tests/models \
	tests/cuda_graphs/test_emulated_captures.py
oldest newest: %: .venv-%/.installed
	.venv-$*/bin/python -c 'import torch; print("torch", torch.__version__)'
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest $(BARE)
	OMP_NUM_THREADS=1 PYTHONPATH=.venv-$*/device .venv-$*/bin/python -m pytest --device soft $(ON_DEVICE)

clean:
	rm -rf .venv .venv-oldest .venv-newest results

define install
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		f"this needs Python 3.11 or later; python3 is {sys.version.split()[0]}")'
	@echo "Setting up .venv; the first time this downloads torch and takes some minutes."
	python3 -m venv .venv
	$(python) -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[$(1)]'
endef

.venv/.compare: setup.cfg pyproject.toml constraints.txt
	$(call install,compare)
	touch $@

# what the comparison needs is a part of it
.venv/.installed: setup.cfg pyproject.toml constraints.txt
	$(call install,compare$(comma)test$(comma)notebooks$(comma)lint)
	touch .venv/.compare $@

comma := ,

# the bound is read where pip reads it
.venv-oldest/.installed: torch = torch==$(shell sed -n 's/^ *torch>=//p' setup.cfg)
.venv-newest/.installed: torch = torch
.venv-oldest/.installed .venv-newest/.installed: setup.cfg pyproject.toml
	python3 -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		pytest pytest-timeout '$(torch)' --editable .
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		--target $(@D)/device --constraint constraints.txt numpy hypothesis
	touch $@
