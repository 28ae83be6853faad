"""Errors that a user or a user's environment causes, by kind.

Each error is also the built-in exception that Python or torch would have raised there, so that
code which catches `ValueError` or `RuntimeError` goes on working.
"""

import contextlib
import difflib
import importlib
import reprlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# characters of a value that an error repeats, at most
LONGEST = 200


class ZooError(Exception):
    """The base of every error that `zoo` raises on purpose."""


class PlanError(ZooError, ValueError):
    """A plan is malformed or does not fit its model."""


class BudgetError(ZooError, ValueError):
    """No plan keeps to a budget; the error has the least that one needs.

    `budget`, `least` and `baseline` (the peak of the baseline) are bytes, None where unknown.
    """

    def __init__(
        self,
        text: str,
        budget: int | None = None,
        least: int | None = None,
        baseline: int | None = None,
    ) -> None:
        super().__init__(text)
        self.budget, self.least, self.baseline = budget, least, baseline


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a search; the error has the results so far.

    `found` is a `Frontier` of the best plans so far, where `zoo.plan` or `zoo.frontier` was
    interrupted; of `zoo.largest` and `zoo.max_batch_size` the largest size that is known to fit.
    """

    def __init__(self, text: str, found: Any) -> None:
        super().__init__(text)
        self.found = found

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.found)


class InputError(ZooError, ValueError):
    """A model does not take an input of this shape, type or range."""


class ModelNameError(ZooError, ValueError):
    """The catalog holds no model of this name."""


class ArgumentError(ZooError, ValueError):
    """A model or a function does not take this argument or this value."""


class FileError(ArgumentError, OSError):
    """A file cannot be read or written."""


class WeightsError(ZooError, RuntimeError):
    """Keys or shapes of a state dict do not fit; nothing was loaded."""


class ConfigError(ZooError, ValueError):
    """A key or a value of a config is wrong."""


class RecomputeError(ZooError, RuntimeError):
    """A recomputation cannot reproduce the forward; raised before a gradient is used."""


class OptimizerError(ZooError, RuntimeError):
    """An optimizer cannot step in the backward; raised before a wrong number is used."""


class GraphError(ZooError, RuntimeError):
    """A training step cannot be a CUDA graph, or no longer is the one that was captured.

    Raised before any of the step has run, or by an audit: then `result` has what it returned.
    """

    def __init__(self, text: str, result: Any = None) -> None:
        super().__init__(text)
        self.result = result


class DeterminismError(ZooError, RuntimeError):
    """A model cannot train by torch's deterministic algorithms."""


class VerifyError(ZooError, AssertionError):
    """A verified training was not that of the baseline, or this cannot be told."""


def nearest(name: str, names: Iterable[str], before: str = "") -> str:
    """Returns ' Did you mean a, b?' for the names closest to `name`, or '' when none is close.

    Upper and lower case count as equal; `before` is written before each.
    """
    spelled = {key.lower(): f"{before}{key}" for key in names}
    close = difflib.get_close_matches(name.lower(), spelled, n=3, cutoff=0.5)
    return f" Did you mean {', '.join(map(spelled.__getitem__, close))}?" if close else ""


def shortened(value: object) -> str:
    """Returns a value's repr for an error: of a long or deep one about 200 characters.

    The whole repr is never made: that of nested lists may be longer than any memory.
    """
    return shortened_text(_Brief().repr(value))


def shortened_text(text: str, longest: int = LONGEST) -> str:
    """Returns a text for an error, without the middle of a long one."""
    if len(text) <= longest:
        return text
    end = (longest - 3) // 2
    return f"{text[: longest - 3 - end]}...{text[-end:]}"


def in_a_line(error: BaseException, longest: int = 10**6) -> str:
    """Returns the type and the message of an error as one line."""
    return shortened_text(" ".join(f"{type(error).__name__}: {error}".split()), longest)


def needed(module: str, what: str, kind: type[ZooError], extra: str = "compare") -> Any:
    """Imports a module; if a package is missing, an error of this kind says what needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # the error of a package that is there and cannot be imported has no name
        package = error.name.partition(".")[0] if error.name else f"a package ({error})"
        raise kind(f"{what} needs {package}: pip install 'zoo-checkpoint[{extra}]'") from error


@contextlib.contextmanager
def file_errors_as(
    kind: type[ZooError], path: str | Path, what: str = "written", way_out: str = ""
) -> Iterator[None]:
    """Turns an OSError inside the block into an error of this kind that names the file."""
    try:
        yield
    except FileError:
        # names its file already
        raise
    except OSError as error:
        name = shortened(str(path))
        raise kind(f"{name} cannot be {what}: {error.strerror or error}{way_out}") from error


class _Brief(reprlib.Repr):
    """Writes ten items of each container, to a depth of three."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 10
        self.maxstring = self.maxother = self.maxlong = LONGEST

    def repr_int(self, x: int, level: int) -> str:
        """Writes a whole number; Python itself refuses to write more than some 4,000 digits."""
        if abs(x).bit_length() > 10 * LONGEST:
            return f"a whole number of {x.bit_length()} bits"
        return super().repr_int(x, level)
