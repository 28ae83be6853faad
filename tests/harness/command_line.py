"""Configs as `zoo compare` reads them."""

from zoo.cli import comparison
from zoo.cli.parser import command

load = command(comparison.COMPARED)(comparison.load)
