# `make test`, `compare`, `lint`, `notebooks`, `fuzz` and `mutants` each do their own set-up on a
# fresh machine.
# It needs python3 (3.11 or later) and is repeated only when what is installed changes.

python := .venv/bin/python

.PHONY: compare test lint notebooks check-notebooks fuzz mutants clean

compare: .venv/.installed
	$(python) test_memory_optimized.py

# two processes with a thread each, a file's tests by the same: kernels of two threads in both would
# wait for one another
test: .venv/.installed
	OMP_NUM_THREADS=1 $(python) -m pytest -n 2 --dist loadfile

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

# random chains by random plans: at least 2,000 and at least so many minutes
MINUTES ?= 10
fuzz: .venv/.installed
	$(python) -m tests.fuzz --minutes $(MINUTES)

# each guard of the engine is taken out in turn; its tests must notice
mutants: .venv/.installed
	$(python) -m tests.mutants

clean:
	rm -rf .venv results

.venv/.installed: setup.cfg pyproject.toml constraints.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		f"this needs Python 3.11 or later; python3 is {sys.version.split()[0]}")'
	@echo "Setting up .venv; the first time this downloads torch and takes some minutes."
	python3 -m venv .venv
	$(python) -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[compare,test,notebooks,lint]'
	touch $@
