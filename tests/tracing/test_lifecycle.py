"""A model under a plan is the same object, and itself again afterwards."""

import copy
import functools
import inspect
import io
import pickle
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.tracing.models import Block, Net, Reader
from tests.training import assert_same, gradients, images, train
from zoo.errors import ArgumentError
from zoo.invocation import InputSpec, Invocation
from zoo.tracing.planned_forward import patched_forward


def batch() -> list[Tensor]:
    return [images()]


@pytest.mark.parametrize("build", [Net, Reader])
def test_uncheckpoint_leaves_no_trace(build: type[nn.Module]) -> None:
    model = build()
    before = {module: dict(vars(module)) for module in model.modules()}
    assert zoo.checkpoint(model, "blocks") is model
    model(images()).sum().backward()
    assert zoo.uncheckpoint(model) is model
    assert {module: dict(vars(module)) for module in model.modules()} == before


def test_names_keys_and_the_signature_stay() -> None:
    plain, model = Net(), zoo.checkpoint(Net())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert type(model) is Net
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert model.forward.__name__ == plain.forward.__name__


@pytest.mark.parametrize("path", ["", "blocks.0"])
def test_a_forward_has_what_a_bound_method_has(path: str) -> None:
    whole = zoo.checkpoint(Net(), "blocks")
    model, plain = whole.get_submodule(path), Net().get_submodule(path).forward
    forward = model.forward
    assert forward.__self__ is model
    for name in (
        "__name__",
        "__qualname__",
        "__doc__",
        "__module__",
        "__defaults__",
        "__globals__",
    ):
        assert getattr(forward, name) == getattr(plain, name), name
    assert inspect.getfullargspec(forward) == inspect.getfullargspec(plain)
    assert get_type_hints(forward) == get_type_hints(plain)
    assert functools.wraps(forward)(forward.__func__).__name__ == "forward"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = forward.no_such_name


def test_a_forward_that_is_bound_anew_runs_by_the_plan() -> None:
    """As libraries do that wrap the function of a forward: accelerate casts its outputs so."""
    model = zoo.checkpoint(Net(), "blocks")
    forward = model.forward.__func__
    expected = train(zoo.uncheckpoint(copy.deepcopy(model)), batch)
    patched = patched_forward(model)
    model.forward = types.MethodType(functools.wraps(forward)(forward), model)
    assert_same(train(model, batch), expected)
    assert patched is not None
    assert patched.latest is not None
    # of another module it is the function of its class
    other, x = Net().eval(), images(1)
    assert torch.equal(forward(other, x), other(x))
    assert zoo.checkpoint(nn.Linear(2, 2)).forward.__func__ is not None


class Cyclic(nn.Module):
    """Reads a dict that contains itself, among its arguments or its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own: dict[str, Any] = {"scale": torch.full((4,), 2.0)}
        self.own["list"] = [self.own]

    def forward(self, given: dict[str, Any]) -> Tensor:
        x = self.first(given["self"]["x"]).sin() * self.own["list"][0]["scale"]
        return self.last(x).relu()


@pytest.mark.parametrize("options", [{}, {"checkpoint": "blocks"}, {"max_overhead": 9.0}])
def test_an_argument_may_contain_itself(options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"x": torch.rand(3, 4)}
    given["self"] = given
    plain = Cyclic()
    model = zoo.checkpoint(copy.deepcopy(plain), **options)
    assert_same(train(model, lambda: [given]), train(plain, lambda: [given]))
    assert zoo.plan_of(model) is not None
    assert zoo.verify(plain, (given,), steps=1).exact


class OnAGraph(nn.Module):
    """Multiplies by a sparse adjacency matrix, a buffer."""

    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(self.get_buffer("adjacency") @ layer(x))
        return x


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "coalesced": lambda dense: dense.to_sparse().coalesce(),
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("options", [{}, {"checkpoint": "blocks"}, {"max_overhead": 9.0}])
@pytest.mark.parametrize("layout", SPARSE)
def test_a_sparse_buffer_is_planned_for(layout: str, options: dict[str, Any]) -> None:
    def trained(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = OnAGraph(SPARSE[layout](torch.rand(6, 6).round()))
        if options:
            zoo.checkpoint(model, **options)
        found, x = [], torch.rand(6, 8)
        for _ in range(3):
            model.zero_grad()
            model(x).square().sum().backward()
            found += [weight.grad for weight in model.parameters()]
        assert not options or zoo.plan_of(model) is not None
        return found

    assert all(map(torch.equal, trained(**options or {"checkpoint": True}), trained()))


@pytest.mark.parametrize("path", ["", "blocks.0"])
def test_a_forward_that_outlives_its_module_says_so(path: str) -> None:
    forward = zoo.checkpoint(Net(), "blocks").get_submodule(path).forward
    with pytest.raises(ArgumentError, match="the module of this forward was freed: a forward"):
        forward(images())


class Segments(Net):
    """Calls each of its blocks as a segment."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = zoo.recompute(block, x)
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize("options", [None, {"checkpoint": True}, {"checkpoint": 2}])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_between_forward_and_backward_is_independent(way: Any, options: Any) -> None:
    model, twins = Segments(), list[nn.Module]()
    plain = copy.deepcopy(model)
    if options is not None:
        zoo.checkpoint(model, **options)
    for other in (plain, model):
        torch.manual_seed(1)
        loss = other(images()).square().sum()
        twins.append(way(other))
        loss.backward()
    assert_same(gradients(model), gradients(plain))
    assert all(parameter.grad is None for twin in twins for parameter in twin.parameters())
    assert_same(*(train(twin, batch) for twin in twins))


@pytest.mark.parametrize("build", [Net, Reader])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_a_copy_is_planned_and_independent(build: type[nn.Module], way: str) -> None:
    model = zoo.checkpoint(build(), "blocks")
    model(images())
    model(images())
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert zoo.plan_of(twin) is None, "it plans anew"
    weights = [value.clone() for value in model.parameters()]
    plain = zoo.uncheckpoint(copy.deepcopy(model))
    assert_same(train(twin, batch), train(plain, batch))
    assert zoo.plan_of(twin) == zoo.plan_of(model)
    for value, before in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(value, before, rtol=0, atol=0)
    zoo.uncheckpoint(twin)
    assert "forward" not in vars(twin)
    assert "forward" in vars(model)


def test_evaluation_is_that_of_the_model_as_it_is_written() -> None:
    model = zoo.checkpoint(Net(), "blocks").eval()
    with torch.no_grad():
        planned = model(images(1) * 0 + 1)
        assert zoo.plan_of(model) is None
        plain = zoo.uncheckpoint(model)(images(1) * 0 + 1)
    torch.testing.assert_close(planned, plain, rtol=0, atol=0)


def test_steps_of_training_and_of_evaluation_take_turns() -> None:
    def losses(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-4), []
        for _ in range(4):
            found.append(model.train()(images()).square().mean())
            found[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                found.append(model(images()).square().mean())
                found.append(model.eval()(images()).square().mean())
        return found

    plain = Net()
    model = zoo.checkpoint(copy.deepcopy(plain))
    for one, other in zip(losses(model), losses(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_new_head_is_used() -> None:
    """a layer replaced after the first call | | the new one runs"""
    model = zoo.checkpoint(Net(), "blocks")
    assert model(images()).shape == (4, 5)
    model.fc = nn.Linear(4, 7)
    plain = zoo.uncheckpoint(copy.deepcopy(model))
    assert_same(train(model, batch), train(plain, batch))
    assert model(images()).shape == (4, 7)


@pytest.mark.parametrize("registered", ["before", "between"])
def test_hooks_fire_once(registered: str) -> None:
    model, seen = zoo.checkpoint(Net(), "blocks"), []
    if registered == "between":
        model(images())
    for module in (model, model.blocks, model.blocks[1], model.blocks[1].conv):
        module.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    for _ in range(3):
        seen.clear()
        model(images()).sum().backward()
        assert seen == [nn.Conv2d, Block, nn.Sequential, Net]


def test_a_hook_on_a_module_whose_inside_was_cut_acts() -> None:
    def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2

    model = zoo.checkpoint(Net(), "blocks")
    model(images())
    model.blocks[2].register_forward_hook(double)
    plain = zoo.uncheckpoint(copy.deepcopy(model))
    assert_same(train(model, batch), train(plain, batch))


def test_a_checkpointed_part_of_a_model_works() -> None:
    model = nn.Sequential(Net(), nn.Linear(5, 2))
    plain = copy.deepcopy(model)
    zoo.checkpoint(model[0], "blocks")
    assert_same(train(model, batch), train(plain, batch))


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None = None


class Answering(Net):
    def forward(self, x: Tensor) -> Any:
        return {"answer": [Answer(super().forward(x))], "kind": "net", "none": (None, 3)}


def test_a_dataclass_within_containers_comes_back() -> None:
    model = zoo.checkpoint(Answering(), "blocks")
    for _ in range(3):
        output = model(images())
        assert isinstance(output["answer"][0], Answer)
        assert output["answer"][0].logits.shape == (4, 5)
        assert output["answer"][0].loss is None
        assert (output["kind"], output["none"]) == ("net", (None, 3))
        output["answer"][0].logits.sum().backward()
    assert zoo.plan_of(model).depth() == 1


def test_threads_may_share_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = patched_forward(model := zoo.checkpoint(Net(), 2))
    assert patched is not None
    assert patched.module() is model

    def forward(size: int) -> None:
        batch = torch.empty(size, 50 - size)
        patched.cache.kind_of(patched._spec(Invocation((batch,))))

    # another thread runs meanwhile
    for name in ("__hash__", "growth_over"):
        slow = functools.partialmethod(after_a_pause, getattr(InputSpec, name))
        monkeypatch.setattr(InputSpec, name, slow)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(forward, range(50)))


def after_a_pause(spec: InputSpec, ask: Callable[..., Any], *args: Any) -> Any:
    time.sleep(1e-6)
    return ask(spec, *args)


def test_options_replace_each_other() -> None:
    model = zoo.checkpoint(zoo.checkpoint(Net(), 2), "cheap")
    model(images())
    ones = zoo.checkpoint(Net(), "cheap")
    ones(images())
    assert zoo.plan_of(model) == zoo.plan_of(ones)
    zoo.checkpoint(model, False)
    assert "forward" not in vars(model)


def test_what_was_found_is_named_as_in_the_model() -> None:
    found = zoo.chain_of(Net(blocks=2), images())
    assert found.names[:3] == ("stem", "blocks.0.conv", "blocks.0.norm blocks.0.relu")
    assert "blocks.0.mul" in found.names[4]
    assert found.blocks == (0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3)
    assert "11 steps in 4 blocks" in str(found)


def test_the_steps_are_those_of_the_plan() -> None:
    model = zoo.gpt2_small(width=8, depth=2, heads=2, vocabulary=9, positions=4, checkpoint=1)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    found = zoo.chain_of(model, (tokens.to("meta"), tokens.to("meta")))
    model(tokens, tokens).backward()
    assert zoo.plan_of(model) is not None
    assert len(found.names) == len(zoo.plan_of(model).flatten())
    assert any(name.startswith("blocks.0") for name in found.names)


class Lazy(nn.Sequential):
    """Its forward gives parameters, and the statistics of norms, their sizes."""

    def __init__(self) -> None:
        rows = ((nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh()) for _ in range(3))
        super().__init__(*(nn.Sequential(*row) for row in rows))


@pytest.mark.parametrize("option", [True, "blocks", "64MiB"])
def test_parameters_without_a_size_get_it_before_the_plan(option: Any) -> None:
    def trained(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Lazy(), torch.randn(6, 5)
        if checkpointed:
            bound = {"memory_budget": option} if option == "64MiB" else {"checkpoint": option}
            zoo.checkpoint(model, **bound)
        for _ in range(3):
            model(x).square().sum().backward()
        assert (zoo.plan_of(model) is not None) == checkpointed
        return [*(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


class Scaled(Net):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("hooked", [False, True])
def test_a_shallow_copy_runs_its_own_forward(hooked: bool) -> None:
    plain = Scaled()
    model = zoo.checkpoint(copy.deepcopy(plain), "blocks")
    twins = copy.copy(plain), copy.copy(model)
    for twin in twins:
        twin.scale = 3.0
        twin._modules = {**twin._modules, "fc": nn.Identity()}
        first = copy.copy(twin.blocks[0])
        first.scale = nn.Parameter(torch.full((4, 1, 1), 2.0))
        twin._modules["blocks"] = nn.Sequential(first, *twin.blocks[1:])
        if hooked:
            twin.register_forward_hook(lambda *call: call[-1].sin())
    x = images()
    assert_same(*(train(twin, lambda: [x], 2) for twin in twins))
    assert zoo.plan_of(twins[1]) is None
    assert "forward" not in vars(zoo.uncheckpoint(twins[1]))
    assert_same(train(model, batch), train(plain, batch))
    assert zoo.plan_of(model) is not None


def test_a_replica_runs_its_own_forward() -> None:
    """As `nn.DataParallel` makes them, which needs several GPUs."""
    model = zoo.checkpoint(nn.Linear(4, 4))
    replica = model._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(4, 4), torch.ones(4)
    assert torch.equal(replica(torch.rand(2, 4)), torch.ones(2, 4))


class Squash:
    def __call__(self, x: Tensor) -> Tensor:
        return x.tanh()


@pytest.mark.parametrize("function", [torch.relu, Squash(), staticmethod(torch.sigmoid)])
def test_a_forward_need_not_be_a_function_of_python(function: Any) -> None:
    activation = type("Activation", (nn.Module,), {"forward": function})
    plain = nn.Sequential(nn.Linear(4, 4), activation(), nn.Linear(4, 4))
    model = zoo.checkpoint(copy.deepcopy(plain), "blocks")
    rows = torch.randn(6, 4)
    assert_same(train(model, lambda: [rows]), train(plain, lambda: [rows]))
