"""What the user changes between forward and backward: as without, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import (
    WAYS,
    Call,
    Way,
    assert_exact,
    gradients,
    net,
    plain,
    rows,
    state_of,
)


class Scaled(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x) * self.calls)


def mixed() -> nn.Sequential:
    return net(nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [True, False])
def test_train_or_eval_before_the_backward(training: bool, way: Way) -> None:
    """`eval()` before `backward()` | raises | exact

    The mode of dropout and norms is that of the forward; statistics move only there.
    """

    def program(call: Call) -> Any:
        model = net(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.InstanceNorm1d(6)).train(training)
        model[2].running_mean += 1
        loss = way(call, model, *rows()).square().sum()
        model.train(not training)
        loss.backward()
        return state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_functional_call(way: Way, keep: bool) -> None:
    """`torch.func.functional_call` | reads the module's own weights | exact

    Meta-learning, averaged weights: gradients of the swapped ones, buffers too.
    """

    def program(call: Call) -> Any:
        class Wrapper(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = net(nn.BatchNorm1d(4), nn.Linear(4, 4))

            def forward(self, x: Tensor) -> Tensor:
                return way(call, self.inner, x)

        model = Wrapper()
        swapped = {k: (v.detach() * 2).requires_grad_() for k, v in model.named_parameters()}
        buffers = {k: v.clone() for k, v in model.named_buffers()}
        loss = torch.func.functional_call(model, swapped | buffers, tuple(rows())).square().sum()
        loss.backward(retain_graph=keep)
        return [value.grad for value in swapped.values()], buffers, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frozen", [True, False])
def test_requires_grad_changed_before_the_backward(frozen: bool, way: Way) -> None:
    """`requires_grad` toggled (freezing, LoRA) | raises | exact

    Progressive freezing, LoRA: a run at that time would save another number of tensors.
    """

    def program(call: Call) -> Any:
        model = net(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[2].requires_grad_(frozen)
        (x,) = rows()
        loss = way(call, model, x).square().sum()
        model[2].requires_grad_(not frozen)
        loss.backward()
        return x.grad, state_of(model), [p.requires_grad for p in model.parameters()]

    assert_exact(program)


setting = {"scale": 1.0}
scale = 1.0


class Setting:
    value = 1.0


@pytest.mark.parametrize("place", ["number", "dict", "class", "object", "closure"])
def test_values_changed_through_a_variable_before_the_backward(place: str) -> None:
    """a variable of the function changes | its new value, silently | exact

    torch's docs: 'silently incorrect gradients'.
    """

    def program(call: Call) -> Any:
        global scale  # noqa: PLW0603
        scale, setting["scale"], Setting.value, local, found = 1.0, 1.0, 1.0, 1.0, Setting()

        def function(x: Tensor) -> Tensor:
            return (x * scale * setting["scale"] * Setting.value * found.value * local).sin().exp()

        (x,) = rows()
        loss = call(function, x).sum()
        scale = 2.0 if place == "number" else 1.0
        setting["scale"] = 2.0 if place == "dict" else 1.0
        Setting.value = 2.0 if place == "class" else 1.0
        found.value = 2.0 if place == "object" else 1.0
        local = 2.0 if place == "closure" else 1.0
        loss.backward()
        return loss, x.grad

    assert_exact(program)


@pytest.mark.parametrize("change", ["number", "child", "parameter", "forward", "data"])
def test_what_the_user_changes_before_the_backward(change: str) -> None:
    """layers or buffers replaced | the new ones, silently | exact

    The gradient is that of the model that the forward saw.
    """

    def program(call: Call) -> Any:
        model = net(Scaled(), nn.Dropout(0.3))
        first, counting = model[0], model[2]
        weight = first.weight
        loss = call(model, *rows()).square().sum()
        if change == "number":
            model[3].p = 0.9
        elif change == "child":
            model[0] = nn.Linear(4, 4)
        elif change == "parameter":
            first.weight = nn.Parameter(torch.rand(4, 4))
        elif change == "forward":
            counting.forward = lambda x: x
        else:
            counting.linear.weight.data = torch.rand(4, 4)
        loss.backward()
        return weight.grad, gradients(first), gradients(counting)

    assert_exact(program)


def changed_after(call: Call, where: str) -> None:
    (x,) = rows()
    y, layer = x * 1, nn.Linear(4, 4)
    small, big = torch.ones(4), torch.ones(30_000, 4)
    frozen = nn.Linear(4, 4).requires_grad_(False)

    def function(y: Tensor, others: Any = None) -> Tensor:
        z = layer(y).exp() * (others["t"][0] if others else 1)
        return frozen(z.sin() * small * big[: len(z)]).sin()

    inside = {"t": [y * 2]}
    loss = call(function, y, inside if where == "in a dict" else None).sum()
    targets = {"input": y, "in a dict": inside["t"][0], "parameter": layer.weight}
    targets |= {"small closure": small, "big closure": big, "frozen parameter": frozen.weight}
    with torch.no_grad():
        targets[where].add_(1)
    loss.backward()


PLACES = ["input", "in a dict", "parameter", "frozen parameter", "small closure", "big closure"]


@pytest.mark.parametrize("where", PLACES)
def test_tensors_changed_in_place_before_the_backward(where: str) -> None:
    """a weight written, an optimizer stepped early | wrong gradients | raises

    pytorch#178568 and the optimizer stepped too early: the baseline raises, so must this.
    """
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed_after(plain, where)
    with pytest.raises(RuntimeError, match=r"changed|modified"):
        changed_after(zoo.recompute, where)


def test_weights_loaded_before_the_backward() -> None:
    """`load_state_dict` before `backward()` | wrong gradients | raises

    load_state_dict writes in place: the baseline raises, the replay is refused.
    """
    model = mixed()
    state = {name: value * 2 for name, value in model.state_dict().items()}
    loss = zoo.recompute(model, *rows()).sum()
    model.load_state_dict(state)
    with pytest.raises(zoo.RecomputeError, match="changed"):
        loss.backward()


@pytest.mark.parametrize("made", ["outside", "inside"])
@pytest.mark.parametrize("operation", [torch.sin, torch.exp, torch.square])
def test_a_saved_tensor_that_is_detached_in_place(operation: Any, made: str) -> None:
    """`detach_()` of a saved tensor | raises | raises while the tensor is held

    Refused where autograd needs its history: that of an argument, and not of a result.
    """

    def program(call: Call) -> Any:
        x = torch.rand(3, requires_grad=True)

        def inside(x: Tensor, h: Tensor) -> list[Tensor]:
            h = h if made == "outside" else x.clone()
            return [h, operation(h)]

        h, result = call(inside, x, x.clone())
        loss = result.sum()
        (result if operation is torch.exp else h).detach_()
        try:
            loss.backward()
        except RuntimeError as error:
            return "detached in" in str(error)
        return x.grad

    assert_exact(program)
