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
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from zoo.errors import ArgumentError, nearest
from zoo.tracing.graph import Call

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
        return _matching_paths(model, patterns)
    repeated = block_paths(model)
    return (
        repeated if len(repeated) > 1 else tuple(_outermost(_is_in_row, model)) or _parts_of(model)
    )


def block_paths(model: nn.Module) -> tuple[str, ...]:
    """Returns the paths of the modules that repeat, none inside another."""
    counts = Counter(type(module) for module in model.modules() if _is_unit(module))

    def is_repeated(module: nn.Module, parent: nn.Module) -> bool:
        return _is_unit(module) and counts[type(module)] > 1 and not _holds_row(module)

    return tuple(_outermost(is_repeated, model))


def block_of_each(calls: Sequence[Call], paths: Sequence[str]) -> list[str]:
    """Returns for each call the path of its block, '' before the first and after the last."""
    known = frozenset(paths)
    blocks = [next((path for path in call.within if path in known), "") for call in calls]
    last = max((place for place, path in enumerate(blocks) if path), default=0)
    for place in range(1, last):
        blocks[place] = blocks[place] or blocks[place - 1]
    return blocks


def _parts_of(model: nn.Module) -> tuple[str, ...]:
    """Returns the paths of the children of a model; rows of modules give way to theirs."""
    children = list(model.named_children())
    if len(children) == 1 and children[0][1]._modules:
        name, only = children[0]
        return tuple(f"{name}.{path}" for path in _parts_of(only))
    paths = []
    for name, child in children:
        is_row = isinstance(child, ROWS)
        paths += [f"{name}.{inner}" for inner in child._modules] if is_row else [name]
    return tuple(paths)


def _matching_paths(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    names = [name for name, _ in model.named_modules() if name]
    matching: set[str] = set()
    for pattern in patterns:
        # `*` stands for one name, as in a path of files
        level = [name for name in names if name.count(".") == pattern.count(".")]
        matches = {name for name in level if fnmatch.fnmatchcase(name, pattern)}
        if not matches:
            raise ArgumentError(
                f"steps={pattern!r} is no module of {type(model).__name__}."
                f"{nearest(pattern, names)}"
            )
        matching |= matches
    above = tuple(f"{name}." for name in matching)
    return tuple(name for name in names if name in matching and not name.startswith(above))


def _outermost(
    is_block: Callable[[nn.Module, nn.Module], bool], module: nn.Module, path: str = ""
) -> Iterator[str]:
    """Yields the paths of the modules which, with their parent, are blocks; none inside another."""
    for name, child in module.named_children():
        if is_block(child, module):
            yield path + name
        else:
            yield from _outermost(is_block, child, f"{path}{name}.")


def _is_in_row(module: nn.Module, parent: nn.Module) -> bool:
    """Says whether a Sequential stands in a row of such."""
    sequentials = [child for child in parent.children() if isinstance(child, nn.Sequential)]
    return isinstance(parent, ROWS) and isinstance(module, nn.Sequential) and len(sequentials) > 1


def _is_unit(module: nn.Module) -> bool:
    """Says whether a module has children and a forward of its own."""
    rows = [row.forward for row in ROWS]
    return bool(module._modules) and inspect.getattr_static(type(module), "forward") not in rows


def _holds_row(module: nn.Module) -> bool:
    """Says whether a module runs a row of modules that might be blocks."""
    for row in module.modules():
        units = [type(child) for child in row.children() if _is_unit(child)]
        if isinstance(row, ROWS) and len(set(units)) < len(units):
            return True
    return False
