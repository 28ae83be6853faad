"""Every operator of torch's own database, with and without a recording, bit for bit.

    make operators                               # all of it, about half an hour on one core
    python -m tests.operators --samples 3 add    # three samples of operators whose name begins so

A sample is run plainly and in a segment that is replayed in the backward: the operator as it is,
under autocast, in place, and into tensors that are given as `out=`, of the right size and of none.
Outputs, gradients,
arguments after the call and the random state must be equal. What comes out is multiplied by
something trained, so that the operator is replayed even where nothing flows through it.

Left out is what plain torch does not repeat itself, twice in a row, what it refuses, and where it
gives these other numbers below a dispatch mode that does nothing (without a gradient,
`linalg.svdvals` then takes another routine). The table names them.

Besides, every kernel is watched for writing an argument that its schema does not declare written.
"""

import argparse
import itertools
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training import is_same
from zoo.engine.operator_effects import NORMS, STATISTICS, UNDECLARED
from zoo.engine.recompute import recompute
from zoo.engine.replay import replay

# what they return is whatever lay in memory
WITHOUT_CONTENT = (
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
)  # fmt: skip
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
# for the operators that know none of these
OTHERS = (torch.int64, torch.bool)
SEED = 7
NOT_REPEATED = "plain torch does not repeat it"
OTHER_BELOW_MODES = "torch computes it otherwise below any dispatch mode"
REFUSED = "plain torch refuses it"
BY_TWO_NAMES = "autocast casts for one of the two names of a kernel, and a recording refuses both"
NO_CONTENT = "it returns memory that nobody wrote"

Operator = Callable[..., Any]


@dataclass
class Run:
    """What one call and its backward leave."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    arguments: list[Tensor]
    stream: Tensor
    error: str = ""


@dataclass
class Outcome:
    """What became of samples.

    Attributes:
        exact: how many were equal in every bit.
        replayed: at how many of these a kernel was replayed.
        differing: what differed, a line each.
        left_out: how many were not compared, by operator and reason.
        undeclared: kernels that wrote an argument without saying so, and which argument.
    """

    exact: int = 0
    replayed: int = 0
    differing: list[str] = field(default_factory=list)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    undeclared: set[str] = field(default_factory=set)

    def add(self, other: "Outcome") -> None:
        """Adds what became of other samples."""
        self.exact += other.exact
        self.replayed += other.replayed
        self.differing += other.differing
        self.left_out.update(other.left_out)
        self.undeclared |= other.undeclared

    @property
    def samples(self) -> int:
        """How many there were."""
        return self.exact + len(self.differing) + self.left_out.total()


def plain(function: Operator, *args: Any, **kwargs: Any) -> Any:
    """Calls the function: the baseline."""
    return function(*args, **kwargs)


def run(how: Operator, operator: Operator, sample: Any) -> Run:
    """Calls an operator on copies of a sample's arguments, and differentiates what it returns."""
    # torch.manual_seed formats the stack for devices that are not there
    torch.default_generator.manual_seed(SEED)
    given = pytree.tree_map(_copied, (sample.input, sample.args, sample.kwargs))
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def called(*given: Any) -> Any:
        # the input of an in-place operator is no leaf, and something is saved before and after
        first, args, kwargs = pytree.tree_map_only(Tensor, _passed, given)
        returned = operator(first, *args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda value: _used(value, scale), returned)

    leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
    try:
        returned = how(called, *given)
    except Exception as error:  # the operator's own refusal, which must be the same
        return Run([], [], leaves, torch.get_rng_state(), f"{type(error).__name__}: {error}")
    outputs = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
    trained = [leaf for leaf in (*leaves, scale) if leaf.requires_grad]
    reached = [output for output in outputs if output.requires_grad]
    gradients: list[Tensor | None] = []
    try:
        if reached:
            upstream = [_upstream(output) for output in reached]
            gradients = list(torch.autograd.grad(reached, trained, upstream, allow_unused=True))
    except Exception as error:
        message = f"backward {type(error).__name__}: {error}"
        return Run(outputs, [], leaves, torch.get_rng_state(), message)
    return Run(outputs, gradients, leaves, torch.get_rng_state())


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _passed(value: Tensor) -> Tensor:
    return value * 1 if value.requires_grad else value


def _used(value: Tensor, scale: Tensor) -> Tensor:
    if value.layout is not torch.strided or value.is_nested:
        return value
    if value.requires_grad:
        return value * value
    return value.to(torch.complex128 if value.is_complex() else torch.float64) * scale


def _upstream(output: Tensor) -> Tensor:
    found = torch.ones_like(output)
    if found.layout is torch.strided and found.numel():
        found = found * torch.linspace(0.5, 1.5, found.numel()).to(found.dtype).view(found.shape)
    return found


def difference(one: Run, other: Run) -> str:
    """Says in what two runs differ, '' in nothing."""
    if one.error or other.error:
        same = one.error.partition("\n")[0] == other.error.partition("\n")[0]
        return "" if same else f"raises {other.error!r:.300}; plainly {one.error!r:.200}"
    for what in ("outputs", "gradients", "arguments"):
        mine, yours = getattr(one, what), getattr(other, what)
        if len(mine) != len(yours) or not all(map(_is_same, mine, yours)):
            return what
    return "" if torch.equal(one.stream, other.stream) else "random state"


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else is_same(one, other)


class Watch(TorchDispatchMode):
    """Finds the arguments that kernels write although their schemas do not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = list(_named(func._schema, args, kwargs))
        declared = {
            id(storage)
            for argument, _, storage in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        before = [
            (argument.name, position, storage, storage.clone())
            for argument, position, storage in arguments
            if id(storage) not in declared
        ]
        out = func(*args, **kwargs)
        for name, position, storage, copy in before:
            if not _have_same_bytes(storage, copy) and not _is_listed(func, position, name):
                self.found.add(f"{func._schema.name} writes {name}")
        return out


def _named(schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, int, Any]]:
    """Yields the arguments with numbers in memory: what the schema says, where, its storage."""
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.is_cpu:
                storage = leaf.untyped_storage()
                if storage.nbytes():
                    yield argument, position, storage


def _have_same_bytes(one: Any, other: Any) -> bool:
    if one.nbytes() != other.nbytes():
        return False
    return torch.equal(*(torch.empty(0, dtype=torch.uint8).set_(part) for part in (one, other)))


def _is_listed(func: Any, position: int, name: str) -> bool:
    operator = func._schema.name
    if operator in NORMS:
        return position in STATISTICS
    return (position, name) in UNDECLARED.get(operator, ())


def variants(info: Any, dtype: torch.dtype) -> Iterator[tuple[str, Operator]]:
    """Yields the functions of an operator: as it is, in place, into tensors that are given."""
    yield "", info.op
    if dtype is torch.float32:
        yield "(autocast)", torch.autocast("cpu", torch.bfloat16)(info.op)
    if info.inplace_variant is not None:
        yield "_", info.inplace_variant
    if info.supports_out:
        # filled with what few operators return, so that one that is not written shows
        yield "(out)", _into(info.op, lambda value: torch.full_like(value, 7))
        # the kernel gives them their size
        yield "(out of no size)", _into(info.op, _without_size)


def _without_size(value: Tensor) -> Tensor:
    filled: Tensor = torch.full_like(value, 7)
    return filled.as_strided((0,), (1,))


def _into(operator: Operator, like: Callable[[Tensor], Tensor]) -> Operator:
    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        with torch.random.fork_rng(devices=[]):
            expected = operator(*args, **kwargs)
        out = (
            like(expected)
            if isinstance(expected, Tensor)
            else type(expected)(map(like, expected))
            if type(expected) in (tuple, list)
            else tuple(map(like, expected))
        )
        operator(*args, **kwargs, out=out)
        return out

    return called


def dtypes_of(info: Any) -> list[torch.dtype]:
    """Returns the data types in which an operator is tried."""
    found = [dtype for dtype in DTYPES if dtype in info.dtypes]
    return found or [dtype for dtype in OTHERS if dtype in info.dtypes][:1]


def samples_of(info: Any, dtype: torch.dtype, most: int | None) -> list[Any]:
    """Returns the first samples of an operator, the same each time."""
    torch.default_generator.manual_seed(SEED)
    trains = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    # `sample_inputs` looks through the stack for the name of a test
    found = info.sample_inputs_func(info, "cpu", dtype, trains)
    return list(itertools.islice(found, most))


def check(info: Any, dtype: torch.dtype, samples: Iterable[Any]) -> Outcome:
    """Checks samples of an operator in one data type."""
    found = Outcome()
    if info.name in WITHOUT_CONTENT:
        found.left_out[info.full_name, NO_CONTENT] += 1
        return found
    for suffix, operator in variants(info, dtype):
        for number, sample in enumerate(samples):
            if suffix == "_" and getattr(sample, "broadcasts_input", False):
                continue
            title = f"{info.full_name}{suffix}"
            _check_sample(found, title, operator, sample, f"{dtype} sample {number}")
    return found


def _check_sample(found: Outcome, title: str, operator: Operator, sample: Any, which: str) -> None:
    one = run(plain, operator, sample)
    with Watch() as watch:
        watched = run(plain, operator, sample)
    found.undeclared |= watch.found
    # below a dispatch mode torch takes other formulas for a few, also where that does nothing
    is_same_below_modes = not difference(one, watched)
    if not is_same_below_modes and difference(one, run(plain, operator, sample)):
        found.left_out[title, NOT_REPEATED] += 1
        return
    # a dispatch mode around the backward would have autograd take other formulas
    replays: list[bool] = []

    def noted(scheduled: Sequence[Any]) -> None:
        replays.append(bool(scheduled))
        replay(scheduled)

    with mock.patch("zoo.engine.saved_tensors.replay", noted):
        recomputed = run(recompute, operator, sample)
    what = difference(one, recomputed)
    if what and not is_same_below_modes and not difference(watched, recomputed):
        found.left_out[title, OTHER_BELOW_MODES] += 1
    elif "differ under autocast" in recomputed.error:
        found.left_out[title, BY_TWO_NAMES] += 1
    elif what:
        found.differing.append(f"{title} {which}: {what}")
    elif one.error:
        found.left_out[title, REFUSED] += 1
    else:
        found.exact += 1
        found.replayed += any(replays)


def one_of(info: Any, dtype: torch.dtype, among: int) -> list[Any]:
    """Returns one of the first samples of an operator, which one depends on its name."""
    samples = samples_of(info, dtype, among)
    return samples[zlib.crc32(info.full_name.encode()) % len(samples) :][:1] if samples else []


def quietly(info: Any, dtype: torch.dtype, samples: Callable[[], list[Any]]) -> Outcome:
    """Checks samples and drops the warnings of their kernels; a sample that cannot be made, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = samples()
        except Exception as error:
            found = Outcome()
            found.left_out[info.full_name, f"no samples: {type(error).__name__}"] += 1
            return found
        return check(info, dtype, made)


def table(found: dict[str, Outcome], operators: dict[str, set[str]]) -> Iterator[str]:
    """Yields the lines of the result as Markdown."""
    yield "| data type | operators | samples | exact | of these replayed | differing | left out |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name, outcome in found.items():
        numbers = (
            len(operators[name]), outcome.samples, outcome.exact, outcome.replayed,
            len(outcome.differing), outcome.left_out.total(),
        )  # fmt: skip
        yield f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} |"
    yield ""
    yield "| left out | samples | operators |"
    yield "|---|---:|---|"
    left_out = found["all"].left_out
    for reason in sorted({reason for _, reason in left_out}):
        names = sorted(name for name, why in left_out if why == reason)
        count = sum(left_out[name, reason] for name in names)
        yield f"| {reason} | {count:,} | {', '.join(f'`{name}`' for name in names)} |"


def main() -> int:
    """Prints what differs and the table; returns 1 if there was anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*")
    parser.add_argument("--samples", type=int, default=None, help="so many of each at most (all)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    found: dict[str, Outcome] = {"all": Outcome()}
    operators: dict[str, set[str]] = {"all": set()}
    for info in op_db:
        if given.names and not info.name.startswith(tuple(given.names)):
            continue
        for dtype in dtypes_of(info):
            outcome = quietly(info, dtype, lambda i=info, d=dtype: samples_of(i, d, given.samples))
            for name in (str(dtype).removeprefix("torch."), "all"):
                found.setdefault(name, Outcome()).add(outcome)
                operators.setdefault(name, set()).add(info.full_name)
            for line in (*outcome.differing, *sorted(outcome.undeclared)):
                print(line, flush=True)
    print("\n".join(table(found, operators)))
    print(f"\n{(time.monotonic() - start) / 60:.0f} minutes, torch {torch.__version__}")
    return int(bool(found["all"].differing or found["all"].undeclared))


if __name__ == "__main__":
    sys.exit(main())
