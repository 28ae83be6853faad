"""Steps that a training step is cut into cost what they take."""

import contextlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from tests.tracing.runs import MODELS, names_in
from tests.training import real_peak
from zoo.engine.operator_effects import resolved
from zoo.engine.recompute import segment
from zoo.invocation import Invocation
from zoo.loss import own_loss
from zoo.planner.costs import StepCosts, simulate
from zoo.planner.event_costs import Outline
from zoo.planner.optimal import least
from zoo.planner.plan import Plan
from zoo.planner.step_events import KernelRun
from zoo.policy.training_step import Profile
from zoo.profiling.peak_memory import trace
from zoo.profiling.step_recorder import StepRecorder
from zoo.tracing.isolated_trace import step_trace_of
from zoo.tracing.partition import block_paths, partition, paths_of

pytestmark = pytest.mark.usefixtures("without_fork")

every = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> tuple[nn.Module, Invocation]:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    return build(), inputs()


def cut(model: nn.Module, given: Invocation, **options: Any) -> Outline:
    return partition(model, step_trace_of(model, given, **options), block_paths(model))


@every
def test_a_look_ahead_sees_the_operators_that_a_segment_will(name: str) -> None:
    model, given = made(name)
    ahead = names_in(step_trace_of(model, given).events)
    recorder = StepRecorder(model)
    with segment(), recorder:
        given.on(model)
    if name == "deciding":
        # zeros stand in for nothing here: the inputs are real
        assert "aten.gt.Scalar" in ahead
    assert ahead == names_in(recorder.events)
    first = ahead[0]
    assert resolved(first).name() == first.replace(".", "::", 1).removesuffix(".default")


@every
def test_steps_begin_where_no_kernel_writes_what_the_one_before_touched(name: str) -> None:
    model, given = made(name)
    steps = cut(model, given)
    assert steps.cuts[0] == 0
    assert list(steps.cuts) == sorted(set(steps.cuts))
    assert steps.events is not None
    kernels = [(at, event) for at, event in steps.events.forward if isinstance(event, KernelRun)]
    for (_, before), (at, kernel) in itertools.pairwise(kernels):
        assert at not in steps.cuts[1:] or kernel.writes.isdisjoint(before.reads)


def test_names_say_which_module_did_what() -> None:
    model, given = made("net")
    assert tuple(cut(model, given).names[:5]) == (
        "stem",
        "blocks.0.conv",
        "blocks.0.norm blocks.0.relu",
        "blocks.0.drop",
        "blocks.0.mul blocks.0.add_ blocks.0.relu_",
    )


def test_what_is_written_in_place_is_written_in_the_step_that_makes_it() -> None:
    """A segment that began between both would copy it, and save nothing."""
    net = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Hardswish(inplace=True),
        nn.Linear(8, 8), nn.SiLU(inplace=True), nn.Linear(8, 8), nn.SiLU(),
    )  # fmt: skip
    steps = cut(net, Invocation((torch.rand(4, 8),))).names
    assert steps == ("0", "1 2", "3 4", "5", "6")


class AllFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class AllOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(nn.Module):
    """Calls functions by their names and out of a list, under a mode or without."""

    def __init__(self, mode: Callable[[], Any] = contextlib.nullcontext) -> None:
        super().__init__()
        self.mode, self.layer = mode, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            x = torch.exp(self.layer(x)) * torch.tanh(x)
            for function in (torch.sin, torch.cos, torch.sigmoid):
                x = function(x)
            return x.softmax(-1) @ x.T


def test_each_function_is_a_step_wherever_it_is_called() -> None:
    steps = cut(Functions(), Invocation((torch.rand(4, 8),))).names
    # what saves nothing more is part of the next step
    assert steps == ("layer", "exp", "tanh mul", "sin", "cos", "sigmoid", "softmax", "mm")


class Calls(nn.Module):
    """Calls a function of several kernels in a loop; frames lie in one place if none is held."""

    def __init__(self, is_held: bool) -> None:
        super().__init__()
        self.is_held, self.frames = is_held, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.scaled(x)
        return x * 2

    def scaled(self, x: Tensor) -> Tensor:
        if self.is_held:
            self.frames.append(sys._getframe())
        return nn.functional.normalize(x)


def test_where_frames_lie_changes_no_steps() -> None:
    given = Invocation((torch.rand(4, 8, requires_grad=True),))
    held, freed = (cut(Calls(is_held), given).names for is_held in (True, False))
    assert held == freed


@pytest.mark.parametrize("mode", [AllFunctions, AllOperators])
def test_a_mode_of_the_program_changes_no_steps(mode: Callable[[], Any]) -> None:
    given = Invocation((torch.rand(4, 8),))
    steps = cut(Functions(), given)
    inside = cut(Functions(mode), given)
    with mode():
        around = cut(Functions(), given)
    assert inside.names == around.names == steps.names


def test_steps_belong_to_blocks() -> None:
    model, given = made("net")
    assert cut(model, given).blocks == (0, *(n for n in range(1, 5) for _ in range(4)), 5, 5)


class Repeated(nn.Module):
    """Calls one module again and again, twice in a row without a kernel between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.layer(self.first(x)))
        return self.layer(x.sin()).cos()


@pytest.mark.parametrize("is_in_force", [False, True])
def test_each_call_of_a_module_is_a_block(is_in_force: bool) -> None:
    model, x = Repeated(), torch.rand(4, 8)
    if is_in_force:
        zoo.checkpoint(model, "blocks", steps=["layer"])
    found = zoo.chain_of(model, x, steps=["layer"])
    # the sine belongs to the second call
    assert found.blocks == (0, 1, 1, 2, 2, 2, 3, 3, 4)
    zoo.checkpoint(model, 4, steps=["layer"])
    for _ in range(2):
        model(x).sum().backward()
    # of a step that was traced for real
    assert zoo.plan_of(model) == zoo.plan_of(zoo.checkpoint(model, 4, steps=["layer"], inputs=x))


def words() -> tuple[Tensor, None, Tensor]:
    tokens = torch.arange(24).view(12, 2)
    return tokens, None, tokens


class Both(nn.Module):
    """Two models of zoo, and layers that repeat."""

    def __init__(self) -> None:
        super().__init__()
        sizes: Any = {"vocabulary": 30, "embedding": 4, "hidden": 4, "chunk_steps": 4}
        self.models = nn.ModuleList(zoo.lstm(**sizes) for _ in range(2))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(1, 1), Ending()) for _ in range(2))

    def forward(self, *inputs: Any) -> Tensor:
        loss = torch.stack([model(*inputs)[0] for model in self.models])
        for layer in self.layers:
            loss = layer(loss.unsqueeze(1)).squeeze(1)
        return loss.sum()


class Ending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()  # type: ignore[no-any-return]


def test_a_model_of_zoo_has_the_same_blocks_inside_of_any_other() -> None:
    model = Both()
    alone = paths_of(model.models[0], None)
    assert alone == ("chunk", "loss.chunk")
    inside = [f"models.{number}.{path}" for number in range(2) for path in alone]
    assert paths_of(model, None) == (*inside, "layers.0.1", "layers.1.1")
    assert paths_of(nn.Sequential(model), None) == tuple(f"0.{p}" for p in paths_of(model, None))
    count = len(set(zoo.chain_of(model.models[0], words()).blocks))
    of_both = zoo.chain_of(model, words()).blocks
    # what comes before the first block of the second belongs to the last one of the first
    assert len(set(of_both)) == 1 + 2 * (count - 2) + 2 + 1
    assert paths_of(model, ["layers.*"]) == ("layers.0", "layers.1")


def test_a_model_of_zoo_needs_none_of_the_modules_that_it_names() -> None:
    model = zoo.vit_tiny_patch16(depth=1)
    assert paths_of(model, None) == ("blocks.0",)
    model.blocks = nn.Identity()
    assert paths_of(model, None) == ()


def test_steps_are_the_same_whatever_the_blocks_are() -> None:
    model = zoo.gpt2_small(depth=2, width=8, heads=2, vocabulary=30, chunk_tokens=4)
    tokens = torch.arange(16).view(2, 8)
    found = [zoo.chain_of(model, (tokens, tokens), steps=steps) for steps in (None, ["norm"])]
    assert found[0].names == found[1].names
    assert len(set(found[0].blocks)) == 1 + 2 + 4 + 1


class AllStates(nn.Module):
    """Returns what each layer made, as models do that hand caches on."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth))

    def forward(self, x: Tensor) -> list[Tensor]:
        found = [x]
        for layer in self.layers:
            found.append(layer(found[-1]) + found[0])
        return found[1:]


def test_what_no_step_reads_again_is_in_no_state() -> None:
    def sizes(depth: int) -> int:
        model = AllStates(depth)
        profile = Profile(model, cut(model, Invocation.of(torch.rand(2, 8))))
        costs = profile.costs()
        assert len(profile.returned) == depth
        return max(map(len, costs.live[:-1]))

    assert sizes(8) == sizes(4)


@every
def test_the_steps_can_be_measured(name: str) -> None:
    model, given = made(name)
    before = [value.clone() for value in model.state_dict().values()]
    steps = cut(model, given)
    found = Profile(model, steps)
    costs = found.costs(kernels=found.kernels() if name in ("net", "deciding") else ())
    assert len(costs) == len(steps.cuts)
    after = model.state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def costs_of(model: nn.Module, given: Invocation, loss: Any) -> StepCosts:
    profile = Profile(model, cut(model, given, loss=loss))
    return replace(profile.costs(), held_until_end=profile.returned)


def square(output: Any) -> Tensor:
    found: Tensor = (output if isinstance(output, Tensor) else output[0]).square().sum()
    return found


def rows() -> nn.Module:
    layers = [(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*(layer for row in layers for layer in row))


def vit() -> nn.Module:
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", depth=3, drop_rate=0.1)
    return model


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=50,
        )
    )  # fmt: skip


def tokens() -> Invocation:
    words = torch.randint(50, (4, 64))
    return Invocation(kwargs={"input_ids": words, "labels": words})


LARGER: dict[str, tuple[Callable[[], nn.Module], Callable[[], Invocation], Any]] = {
    "rows": (rows, lambda: Invocation((torch.rand(256, 64),)), square),
    "vit": (vit, lambda: Invocation((torch.rand(2, 3, 224, 224),)), square),
    "llama": (llama, tokens, None),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2, enable_nested_tensor=False
        ),
        lambda: Invocation((torch.rand(8, 32, 32),)),
        square,
    ),
}


@pytest.mark.parametrize("name", LARGER)
def test_the_predicted_peak_is_the_measured_one(name: str) -> None:
    build, inputs, loss = LARGER[name]
    torch.manual_seed(0)
    model, given = build(), inputs()
    costs = costs_of(model, given, loss).with_parameter_gradients()

    def step() -> None:
        output = given.on(model)
        (own_loss(output) if loss is None else loss(output)).backward()

    step()
    model.zero_grad()
    measured = trace(step).peak
    predicted = simulate(Plan.keep_all(len(costs)), costs).peak
    assert predicted == pytest.approx(measured, rel=0.01)


class Features(nn.Module):
    """Returns early what its own kernel saves and no later step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x.tanh())
            x = x.sin()
        return (x, *found)


@pytest.mark.parametrize("plan", [Plan([tuple(range(9))]), Plan([*range(6), (6, 7, 8)])], ids=str)
def test_an_output_that_is_made_again_counts_twice_until_the_replay_ends(plan: Plan) -> None:
    """The caller holds the first one, which is then the one that autograd gets."""
    torch.manual_seed(0)
    model, given = Features(), Invocation((torch.rand(512, 64),))
    costs = costs_of(model, given, square).with_parameter_gradients()
    zoo.checkpoint(model, plan)

    def step() -> None:
        outputs = given.on(model)
        square(outputs).backward()

    step()
    model.zero_grad()
    predicted = simulate(Plan([*plan, 9]), costs).peak
    assert predicted == pytest.approx(trace(step).peak, rel=0.01)


class OnMeta(nn.Module):
    """Computes with a tensor that is neither a parameter nor an input, and with a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frequencies = nn.Linear(16, 16), torch.rand(16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.frequencies + torch.ones(16)).sin()


def test_what_a_model_on_meta_makes_there_is_planned_for() -> None:
    with torch.device("meta"):
        model, x = OnMeta(), torch.rand(8, 16)
        inside = zoo.plan(model, x, max_overhead=0.5, device="a100")
    on_cpu = zoo.plan(OnMeta(), torch.rand(8, 16), max_overhead=0.5, device="a100")
    assert inside == on_cpu == zoo.plan(model, x, max_overhead=0.5, device="a100")


def test_a_real_step_on_meta_is_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model, x = nn.LSTM(8, 8, 2), torch.rand(5, 2, 8)
    zoo.checkpoint(model)
    for _ in range(2):
        model(x)[0].sum().backward()
    assert "block by block" not in caplog.text


class Accumulating(nn.Module):
    """Adds to a tensor that was made early, and marks labels, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        total, skip = torch.zeros(()), x.sin()
        for layer in self.layers:
            x = x + layer(x)
            if self.in_place:
                total += x.square().mean()
                skip[0] = x[0]
            else:
                total = total + x.square().mean()
                skip = torch.cat([x[:1], skip[1:]])
        return x.sum() + total + skip.sum()


def test_a_write_in_place_binds_what_reads_the_old_version_alone() -> None:
    x = torch.rand(256, 64)
    peaks = []
    for in_place in (False, True):
        model = Accumulating(in_place)
        costs = costs_of(model, Invocation.of(x), lambda y: y).with_parameter_gradients()
        plan = least(costs)
        peaks.append(simulate(plan, costs).peak)
        taken = real_peak(model, x, None, lambda y: y, plan=Plan(plan[:-1]))
        resident = 2 * sum(p.nbytes for p in model.parameters()) + x.nbytes
        assert taken - resident <= 1.02 * peaks[-1]
    assert peaks[1] <= 1.05 * peaks[0]


class Masking(nn.Module):
    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns, self.token = assigns, nn.Parameter(torch.zeros(32))
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6))
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.assigns:
            x = x.clone()
            x[mask] = self.token
        else:
            x = torch.where(mask.unsqueeze(-1), self.token, x)
        return self.layers(x)  # type: ignore[no-any-return]


def test_an_assignment_by_a_mask_is_planned_for() -> None:
    inputs = torch.rand(64, 32), torch.rand(64) < 0.5
    peaks = []
    for assigns in (False, True):
        report = zoo.plan(Masking(assigns), inputs, max_overhead=0.5, optimizer=None)
        peaks.append(report.baseline_peak)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)
