import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import Residuals, images
from zoo.chain import Chain, Steps, fold, outline, step_names
from zoo.errors import WeightsError


class Block(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def steps(self) -> Steps:
        return [self.conv, self.activate]

    def activate(self, x: Tensor) -> Tensor:
        return x.relu()


class Net(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Sequential(Block(), Block())
        self.tail = nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU())

    def steps(self) -> Steps:
        return [self.stem, *self.stage, [self.twice, self.twice], self.tail]

    def stem(self, x: Tensor) -> Tensor:
        return x * 2

    def twice(self, x: Tensor) -> Tensor:
        return x + x


def test_blocks_sequentials_and_lists_become_fine_steps_of_one_block_each() -> None:
    found = outline(Net().steps())
    assert found.blocks == (0, 1, 1, 2, 2, 3, 3, 4, 4)


def test_step_names_are_paths_in_the_model() -> None:
    net = Net()
    assert step_names(net, outline(net.steps()).steps) == [
        *("stem", "stage.0.conv", "stage.0.activate", "stage.1.conv", "stage.1.activate"),
        *("twice", "twice", "tail.0", "tail.1"),
    ]
    chain = Residuals(blocks=2)
    assert step_names(chain, outline(chain.steps()).steps)[3] == "convolve(1)"


def test_forward_folds_the_steps() -> None:
    net, x = Net(), images()
    expected = net.tail(4 * net.stage[1](net.stage[0](2 * x)))
    assert torch.equal(net(x), expected)
    assert torch.equal(fold(outline(net.steps()).steps, (x,)), expected)


@pytest.mark.parametrize("name", ["stage.1", "tail"])
def test_a_block_with_hooks_is_called_and_its_hooks_fire_once(name: str) -> None:
    net, x = Net(), images()
    expected = net(x)
    fired: list[Any] = []
    handle = net.get_submodule(name).register_forward_hook(lambda *_: fired.append(name))
    assert torch.equal(net(x), expected)
    assert fired == [name]
    handle.remove()
    assert len(outline(net.steps()).steps) == 9


def test_copies_and_pickles_are_independent_models() -> None:
    net, x = Net(), images()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), net(x))
        with torch.no_grad():
            other.stage[0].conv.weight.zero_()
        assert not torch.equal(other(x), net(x))


def test_weights_that_do_not_fit_name_the_keys_and_load_nothing() -> None:
    net = Net()
    before = copy.deepcopy(net.state_dict())
    wrong = {key.replace("tail.0", "tail.7"): value + 1 for key, value in before.items()}
    wrong["stage.0.conv.weight"] = torch.zeros(1, 4, 1, 1)
    with pytest.raises(WeightsError, match=r"2 missing: tail.0.bias.*2 unknown: tail.7.*\(1, 4"):
        net.load_state_dict(wrong)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_loose_loading_still_refuses_other_shapes_only() -> None:
    net = Net()
    net.load_state_dict({"tail.0.bias": torch.ones(2), "other": torch.ones(1)}, strict=False)
    assert torch.equal(net.tail[0].bias, torch.ones(2))
    with pytest.raises(WeightsError, match=r"tail.0.bias \(3,\) instead of \(2,\)"):
        net.load_state_dict({"tail.0.bias": torch.ones(3)}, strict=False)


def test_counters_that_old_weights_lack_are_no_error() -> None:
    model = Residuals()
    weights = {k: v for k, v in model.state_dict().items() if "num_batches" not in k}
    model.load_state_dict(weights)


def test_a_hook_on_a_stage_fires_once() -> None:
    model, x = zoo.resnet18(classes=3), torch.randn(2, 3, 40, 40)
    expected = model.eval()(x)
    shapes: list[Any] = []
    model.layer4.register_forward_hook(lambda _, inputs, output: shapes.append(output.shape))
    assert torch.equal(model(x), expected)
    assert shapes == [(2, 512, 2, 2)]


@pytest.mark.parametrize("wrong", [None, {"tail.0.bias": "two"}])
def test_what_is_no_weight_loads_nothing(wrong: Any) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zeros = {name: torch.zeros_like(value) for name, value in before.items()}
    with pytest.raises(WeightsError, match=r"got NoneType|1 no tensor"):
        model.load_state_dict(zeros | wrong if wrong else wrong)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
