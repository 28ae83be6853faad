"""What `test_audits` runs in each of two processes: one changes what its step reads."""

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.cuda_graphs.adverse_steps import Deep, step_reading
from tests.cuda_graphs.software_graphs import SoftwareGraphs
from zoo.cuda_graphs import graphed_step


def trained() -> tuple[list[Tensor], list[str], list[int]]:
    """Returns the losses of a training, its errors, and the calls that raised them."""
    graphs = SoftwareGraphs()
    graphed_step.graphs_on = lambda device: graphs  # type: ignore[assignment]
    torch.manual_seed(0)
    rank, kept = distributed.get_rank(), Deep(Deep(1.0))
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    step = step_reading(kept, model, optimizer)
    train = zoo.make_graphed_step(step, model=model, optimizer=optimizer)
    losses, errors, calls = [], [], []
    for number in range(60):
        if number == 40 and rank == 1:
            kept.get().put(0.5)
        x = torch.rand(6, 8, generator=torch.Generator().manual_seed(2 * number + rank))
        try:
            losses.append(train(x))
        except zoo.GraphError as error:
            errors.append(str(error))
            calls.append(number)
            losses.append(error.result)
    return losses, errors, [*calls, train.replays]
