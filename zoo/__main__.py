"""`python -m zoo` is the `zoo` command."""

import sys

from zoo.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
