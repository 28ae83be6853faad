"""Which modules of a model are its blocks: the repeated units that people checkpoint.

    Sequential / ModuleList of stages      layers.0, layers.1
        Sequential / ModuleList of blocks      layers.0.blocks.0   <- a block
            attention, mlp                         no blocks: not in a row of their like

A block is a module with children and a forward of its own, of a class that occurs at least twice,
and that holds no row of such modules itself: a stage gives way to what it repeats. A model without
any falls into its children, or into the Sequentials that stand in a row. What runs between two
blocks belongs to the first of them.
"""

import fnmatch
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from zoo.errors import ArgumentError, nearest
from zoo.tracing.graph import Call

ROWS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def block_paths(model: nn.Module) -> tuple[str, ...]:
    """Returns the paths of the blocks of a model, none inside another."""
    counts = Counter(type(module) for module in model.modules() if _is_unit(module))
    return tuple(_found(model, "", counts))


def row_paths(model: nn.Module) -> tuple[str, ...]:
    """Returns the paths of Sequentials that stand in a row of such, none inside another."""
    return tuple(_in_rows(model, ""))


def parts_of(model: nn.Module) -> tuple[str, ...]:
    """Returns the paths of the children of a model; rows of modules give way to theirs."""
    children = list(model.named_children())
    if len(children) == 1 and children[0][1]._modules:
        name, only = children[0]
        return tuple(f"{name}.{path}" for path in parts_of(only))
    return tuple(
        path
        for name, child in children
        for path in (
            [f"{name}.{inner}" for inner in child._modules] if isinstance(child, ROWS) else [name]
        )
    )


def block_of_each(calls: Sequence[Call], paths: Sequence[str]) -> list[str]:
    """Returns for each call the path of its block, '' before the first and after the last."""
    known = frozenset(paths)
    found = [_block_of(call, known) for call in calls]
    last = max((place for place, path in enumerate(found) if path), default=0)
    for place in range(1, last):
        found[place] = found[place] or found[place - 1]
    return found


def matching_paths(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns the paths that match any of some patterns (`blocks.*`), none inside another.

    Raises:
        ArgumentError: a pattern that matches nothing.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: set[str] = set()
    for pattern in patterns:
        # `*` stands for one name, as in a path of files
        matches = {
            name
            for name in names
            if name.count(".") == pattern.count(".") and fnmatch.fnmatchcase(name, pattern)
        }
        if not matches:
            raise ArgumentError(
                f"steps={pattern!r} is no module of {type(model).__name__}."
                f"{nearest(pattern, names)}"
            )
        found |= matches
    return tuple(
        name for name in names if name in found and not any(map(found.__contains__, _above(name)))
    )


def _block_of(call: Call, paths: frozenset[str]) -> str:
    return next((path for path in call.within if path in paths), "")


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _found(module: nn.Module, path: str, counts: Counter[type]) -> Iterator[str]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if _is_unit(child) and counts[type(child)] > 1 and not _holds_row(child):
            yield inner
        else:
            yield from _found(child, inner, counts)


def _in_rows(module: nn.Module, path: str) -> Iterator[str]:
    alike = [isinstance(child, nn.Sequential) for child in module.children()]
    is_row = isinstance(module, ROWS) and sum(alike) > 1
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if is_row and isinstance(child, nn.Sequential):
            yield inner
        else:
            yield from _in_rows(child, inner)


def _is_unit(module: nn.Module) -> bool:
    """Says whether a module has children and a forward of its own."""
    rows = [row.forward for row in ROWS]
    return bool(module._modules) and inspect.getattr_static(type(module), "forward") not in rows


def _holds_row(module: nn.Module) -> bool:
    """Says whether a module goes through a row of modules that might be blocks."""
    rows = (inner for inner in module.modules() if isinstance(inner, ROWS))
    kinds = (Counter(type(child) for child in row.children() if _is_unit(child)) for row in rows)
    return any(count > 1 for found in kinds for count in found.values())
