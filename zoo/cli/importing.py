"""Models of other packages by import path: `timm.create_model`, `mypackage.models:Net`."""

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

from zoo.errors import ArgumentError, nearest, shortened, shortened_text


def imported(path: str) -> Any:
    """Imports what 'package.module.name' or 'package.module:name' names.

    Raises:
        ArgumentError: there is no such module or name, or importing it fails.
    """
    if not all(part.isidentifier() for part in path.replace(":", ".", 1).split(".")):
        raise ArgumentError(f"{shortened(path)} is no import path; write package.module:Name")
    said = shortened_text(path)
    module, colon, rest = path.partition(":")
    name, *names = [module, *rest.split(".")] if colon else path.split(".")
    with working_folder_first():
        found = _module(said, name)
        for part in names:
            name = f"{name}.{part}"
            is_package = hasattr(found, "__path__") and not hasattr(found, part)
            if is_package and importlib.util.find_spec(name) is not None:
                found = _module(said, name)
            else:
                found = _part(said, found, part)
    return found


@contextlib.contextmanager
def working_folder_first() -> Iterator[None]:
    """Lets Python find modules in the folder where the command was given."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def in_a_line(error: BaseException) -> str:
    """Returns what an error of another library says, on one line and not without end."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _module(path: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ArgumentError(
                f"{path}: importing {shortened_text(name)} needs {error.name}"
            ) from error
        near = nearest(error.name, (entry.name for entry in pkgutil.iter_modules()))
        raise ArgumentError(
            f"{path}: there is no module {shortened(error.name)} here.{near}"
        ) from error
    except Exception as error:
        raise ArgumentError(
            f"{path}: importing {shortened_text(name)} fails: {in_a_line(error)}"
        ) from error


def _part(path: str, whole: Any, name: str) -> Any:
    if not hasattr(whole, name):
        owner = getattr(whole, "__name__", type(whole).__name__)
        raise ArgumentError(f"{path}: {owner} has no {shortened(name)}.{nearest(name, dir(whole))}")
    return getattr(whole, name)
