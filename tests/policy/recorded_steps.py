"""Training steps that an H200 ran, and what zoo predicts for them today without one.

    python -m tests.policy.recorded_steps

`recorded_steps.json` has what was recorded (one run on an NVIDIA H200, torch 2.11.0+cu130, commit
6b9466f): for each step the budget that was asked for, if any, the prediction of then, and
`torch.cuda.max_memory_allocated`; for each model the workspaces and seconds of its kernels, as zoo
measured them there, where they were kept. The plans were not kept. A plan of the same model whose
prediction was about that of the plan that ran stands for it, and `before` is what the code of then
predicts for that plan. The steps were `loss(model(x)).backward()`, with AdamW or SGD with momentum.

The steps are traced on emulated CUDA (`tests.profiling.cuda_runtime`); no kernel runs.
"""

import functools
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.profiling import cuda_runtime

RECORDED = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
MODELS: dict[str, dict[str, Any]] = RECORDED["models"]
# what torch 2.11 holds for a thread on Hopper: for cuBLAS, and for cuBLASLt, which adds a bias, too
PRODUCT, WITH_BIAS = 32 << 20, 33 << 20
LONGEST = 500  # characters of a call's text, by which its costs are kept
UNKNOWN = 5e-6  # seconds of a call that was not recorded, where others were


class Step(NamedTuple):
    """A step: what was asked and taken on the device, and what is predicted now, in bytes."""

    case: str
    asked: int | None
    taken: int
    predicted: int

    @property
    def above(self) -> float:
        """The prediction over what was taken, less 1."""
        return self.predicted / self.taken - 1


def key_of(spec: Any) -> str:
    """Returns a short name for a kernel call, by which its costs are kept.

    The recorded ones were made when a spec said what requires a gradient, not what is conjugate,
    and had its arguments as one of torch's pytrees.
    """
    import torch.utils._pytree as pytree  # noqa: PLC0415

    def nested(value: Any) -> Any:
        is_leaf = hasattr(value, "dtype") or not isinstance(value, tuple)
        return None if is_leaf else list(map(nested, value))

    kwargs = {name: nested(value) for name, value in spec.kwargs}
    tree = pytree.tree_structure((tuple(map(nested, spec.args)), kwargs))
    text = f"KernelSpec(operator={spec.operator!r}, leaves={spec.leaves!r}, tree={tree!r})"
    text = text.replace(", conjugate=False, negative=False", "").replace(
        ", bytes=", ", requires_grad=False, bytes="
    )
    return hashlib.sha256(text[:LONGEST].encode()).hexdigest()[:10]


@functools.cache
def steps() -> list[Step]:
    """Predicts the recorded steps in one process: importing torch takes longer than a model."""
    program = "from tests.policy.recorded_steps import MODELS, predictions\n"
    # an H200 is a Hopper: compute capability 9.0
    predicted = cuda_runtime.run(
        f"{program}print(json.dumps([*map(predictions, MODELS)]))", SOFTWARE_CUDA_MAJOR="9"
    )
    recorded = itertools.chain.from_iterable(model["steps"] for model in MODELS.values())
    return [
        Step(
            step["case"], step.get("asked"), step["taken"], step["predicted"] + now - step["before"]
        )
        for step, now in zip(recorded, itertools.chain.from_iterable(predicted), strict=True)
    ]


def predictions(name: str) -> list[int]:
    """Returns what is predicted for the plans of a model's steps; runs on emulated CUDA."""
    planner = planner_of(name)
    plans = [step.get("plan") for step in MODELS[name]["steps"]]
    points = [planner.baseline if plan is None else planner.point(_plan(plan)) for plan in plans]
    return [point.peak for point in points]


def _plan(text: str) -> Any:
    from zoo.planner.plan import Plan  # noqa: PLC0415

    return Plan.parse(text)


def planner_of(name: str) -> Any:
    """Returns a planner of a model's step by its recorded costs; runs on emulated CUDA."""
    # imported late, since only the process on emulated CUDA needs torch's CUDA
    import contextlib  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from zoo.api.plan import planner_for  # noqa: PLC0415
    from zoo.policy import training_step  # noqa: PLC0415

    def recorded(specs: Any, *_: Any, **__: Any) -> list[Any]:
        return [spec and _costs(spec, MODELS[name]) for spec in specs]

    training_step.measure_kernels = recorded
    build, inputs, loss, make = _setups()[name]
    with torch.device("meta"):
        model = build()
    model.to_empty(device="cuda").train()
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    half = torch.autocast("cuda", torch.bfloat16)
    with half if "float32" not in name else contextlib.nullcontext():
        return planner_for(model, inputs, optimizer=make, loss=loss, holds_outputs=False)


def _costs(spec: Any, model: dict[str, Any]) -> Any:
    import torch  # noqa: PLC0415

    from zoo.profiling.kernel_costs import PRODUCTS, KernelCosts  # noqa: PLC0415

    operator = spec.operator.rpartition(".")[0]
    if operator == "aten.sum" and not spec.kwargs:
        # recorded inside of autocast, by which a sum of bfloat16 is made in float32
        inside = spec._replace(kwargs=(("dtype", torch.float32),))
        spec = inside if key_of(inside) in model["workspaces"] else spec
    held = WITH_BIAS if operator == "aten.addmm" else PRODUCT if operator in PRODUCTS else 0
    key, seconds = key_of(spec), model.get("seconds", {})
    return KernelCosts(seconds.get(key, UNKNOWN), model["workspaces"].get(key, 0), held)


def _setups() -> dict[str, tuple[Any, Any, Any, Any]]:
    """Returns for each model what builds it, its inputs, its loss and its optimizer."""
    from functools import partial  # noqa: PLC0415

    import timm  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    from torch.nn.functional import cross_entropy  # noqa: PLC0415

    import zoo  # noqa: PLC0415

    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    adamw = torch.optim.AdamW

    def images(count: int, build: Any, make: Any) -> tuple[Any, Any, Any, Any]:
        labels = torch.zeros(count, dtype=torch.long, device="cuda")
        batch = torch.empty(count, 3, 224, 224, device="cuda")
        return build, batch, lambda outputs: cross_entropy(outputs, labels), make

    def texts(shape: tuple[int, int], build: Any) -> tuple[Any, Any, Any, Any]:
        tokens = torch.zeros(shape, dtype=torch.long, device="cuda")
        return build, {"input_ids": tokens, "labels": tokens}, None, adamw

    resnet = partial(timm.create_model, "resnet50")
    voxels = torch.zeros(2, 128, 128, 64, dtype=torch.long, device="cuda")
    gpt2 = transformers.GPT2Config(use_cache=False)
    llama = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    return {
        "timm ResNet-50, 256": images(256, resnet, sgd),
        "timm ResNet-50, 128, float32": images(128, resnet, sgd),
        "ViT-B/16, 128": images(128, zoo.vit_base_patch16, adamw),
        "DenseNet-121, 128": images(128, zoo.densenet121, sgd),
        "timm ConvNeXt-T, 128": images(128, partial(timm.create_model, "convnext_tiny"), adamw),
        "V-Net, 2x128x128x64": (
            partial(zoo.vnet, classes=3, activation="prelu"),
            torch.empty(2, 1, 128, 128, 64, device="cuda"),
            lambda outputs: cross_entropy(outputs, voxels),
            adamw,
        ),
        "HF GPT-2, 16x1024": texts((16, 1024), partial(transformers.GPT2LMHeadModel, gpt2)),
        "HF Llama 1B, 4x2048": texts((4, 2048), partial(transformers.LlamaForCausalLM, llama)),
    }


if __name__ == "__main__":
    print(f"{'step':40} {'asked':>14} {'predicted':>14} {'taken':>14}  above")
    for row in steps():
        asked = f"{row.asked:,}" if row.asked else "baseline"
        print(f"{row.case:40} {asked:>14} {row.predicted:>14,} {row.taken:>14,} {row.above:6.2%}")
