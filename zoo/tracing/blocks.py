"""Which modules of a model are its blocks: the repeated units that people checkpoint.

    Sequential / ModuleList of stages      layers.0, layers.1
        Sequential / ModuleList of blocks      layers.0.blocks.0   <- a block
            attention, mlp                         no blocks: nothing repeats them in a row

A block is a module with children and a forward of its own, of a class that occurs at least twice,
and that holds no row of such modules itself: a stage gives way to what it repeats. A model without
any falls into the Sequentials that stand in a row, or into its children. What runs between two
blocks belongs to the first of them.

A model may also checkpoint blocks itself, by switches that libraries have; then it is refused.
"""

import fnmatch
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from zoo.errors import ArgumentError, nearest

ROWS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# the attribute that is true while a model checkpoints itself, and how to turn it off
SWITCHES = {
    "grad_checkpointing": "model.set_grad_checkpointing(False)",
    "gradient_checkpointing": "model.gradient_checkpointing_disable()",
    "memory_efficient": "building it with memory_efficient=False",
    "use_checkpoint": "building it with use_checkpoint=False",
    "with_cp": "building it with with_cp=False",
}


def check_switches(model: nn.Module) -> None:
    """Raises ArgumentError when a model's own checkpointing is on: both would recompute everything.

    That of torch, which the models call, also updates running statistics twice.
    """
    for path, module in model.named_modules():
        for name, way in SWITCHES.items():
            if vars(module).get(name) is True:
                where = f"{path}.{name}" if path else name
                raise ArgumentError(
                    f"{type(model).__name__} checkpoints itself ({where} is True). Turn that off "
                    f"by {way}, then zoo.checkpoint takes its place"
                )


def paths_of(model: nn.Module, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the paths of the blocks of a model: those named, those that repeat, or its parts.

    Raises:
        ArgumentError: one of the `patterns`, such as `blocks.*`, matches nothing.
    """
    if patterns is not None:
        return _outermost(_matching(model, patterns))
    repeated = block_paths(model)
    return repeated if len(repeated) > 1 else _outermost(_rows(model)) or tuple(_parts(model))


def block_paths(model: nn.Module) -> tuple[str, ...]:
    """Returns the paths of the modules that repeat, none inside another."""
    counts = Counter(type(module) for module in model.modules() if _is_unit(module))
    return _outermost(
        path
        for path, module in model.named_modules()
        if path and _is_unit(module) and counts[type(module)] > 1 and not _holds_row(module)
    )


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the paths that are not inside of another."""
    found = list(paths)
    above = tuple(f"{path}." for path in found)
    return tuple(path for path in found if not path.startswith(above))


def _matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    matching: set[str] = set()
    for pattern in patterns:
        # `*` stands for one name, as in a path of files
        level = [name for name in names if name.count(".") == pattern.count(".")]
        matches = fnmatch.filter(level, pattern)
        if not matches:
            raise ArgumentError(
                f"steps={pattern!r} is no module of {type(model).__name__}."
                f"{nearest(pattern, names)}"
            )
        matching.update(matches)
    return [name for name in names if name in matching]


def _rows(model: nn.Module) -> Iterator[str]:
    """Yields the paths of the Sequentials that stand in a row of such."""
    for path, row in model.named_modules():
        found = [name for name, child in row.named_children() if isinstance(child, nn.Sequential)]
        if isinstance(row, ROWS) and len(found) > 1:
            yield from (f"{path}.{name}" if path else name for name in found)


def _parts(model: nn.Module) -> Iterator[str]:
    """Yields the paths of the children of a model; rows of modules give way to theirs."""
    children = dict(model.named_children())
    for name, child in children.items():
        if len(children) == 1 and child._modules:
            yield from (f"{name}.{path}" for path in _parts(child))
        elif isinstance(child, ROWS):
            yield from (f"{name}.{inner}" for inner in child._modules)
        else:
            yield name


def _is_unit(module: nn.Module) -> bool:
    """Says whether a module has children and a forward of its own."""
    # TorchScript's classes have a forward that only their objects can look up
    forward = inspect.getattr_static(type(module), "forward")
    return bool(module._modules) and forward not in [row.forward for row in ROWS]


def _holds_row(module: nn.Module) -> bool:
    """Says whether a module runs a row of modules that might be blocks."""
    rows = (row for row in module.modules() if isinstance(row, ROWS))
    units = ([type(child) for child in row.children() if _is_unit(child)] for row in rows)
    return any(len(set(types)) < len(types) for types in units)
