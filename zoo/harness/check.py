"""Finds what a cell cannot run with before any cell runs, on meta tensors: they take no memory.

Of a config's ten models the last would otherwise say after an hour that its text is too long.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zoo.catalog import create
from zoo.chain import Outline
from zoo.entry import Invocation, called
from zoo.errors import ConfigError, ZooError
from zoo.harness.cells import Cell
from zoo.harness.config import ModelConfig
from zoo.harness.data import batches
from zoo.harness.processes import outcome
from zoo.plan import Plan
from zoo.planner.schemes import NAMES, segments

LONGEST = 600  # seconds


def check_cells(cells: Sequence[Cell]) -> None:
    """Builds the cells' models and asks each for its steps, all in one process, without memory.

    Raises:
        ConfigError: a package for data is missing, or a size, an argument or a plan does not fit.
    """
    if not cells:
        return
    found = outcome(first_fault, tuple(cells), LONGEST)
    # what goes wrong with the process itself is left to the cells
    if found.get("fault"):
        raise ConfigError(found["fault"])


def first_fault(cells: Sequence[Cell]) -> dict[str, str | None]:
    """Returns under "fault" what is wrong with the first cell that cannot run."""
    faults = (fault for fault in map(_fault, cells) if fault is not None)
    return {"fault": next(faults, None)}


def _fault(cell: Cell) -> str | None:
    try:
        _build(cell.model)
    except ZooError as error:
        text = str(error)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
    else:
        return None
    name = cell.model.name
    return text if text.startswith(name) else f"{name}: {text}"


def _build(model: ModelConfig) -> None:
    """Builds a model, has it check inputs of the shape of a batch, and checks its plan."""
    with torch.device("meta"):
        chain = create(model.name, **model.arguments)
    inputs, targets = _shapes(model)
    given: dict[str, tuple[Tensor | None, ...]] = {
        "text": (inputs, targets),
        "stream": (inputs, None, targets),
    }
    # a chain refuses inputs before its first step: its forward, seconds for a thousand layers even
    # on meta tensors, would find no more
    steps, _ = called(chain, Invocation(given.get(model.data, (inputs,))))
    _check_plan(steps, model.checkpoint)


def _shapes(model: ModelConfig) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets of a batch, as shapes; images are made one at a time."""
    text = model.data in ("text", "stream")
    (batch,) = batches(model if text else replace(model, batch_size=1), 1, seed=0)
    return _grown(batch.inputs, model, text), _grown(batch.targets, model, text)


def _grown(tensor: Tensor, model: ModelConfig, whole: bool) -> Tensor:
    shape = tensor.shape if whole else (model.batch_size, *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _check_plan(found: Outline, checkpoint: bool | int | str) -> None:
    if isinstance(checkpoint, bool) or checkpoint in NAMES:
        return
    if isinstance(checkpoint, int):
        segments(found.blocks, checkpoint)
    else:
        Plan.parse(checkpoint).check(len(found.steps))
