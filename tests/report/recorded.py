"""A comparison as the harness records it, small and made by hand."""

from typing import Any

MIB = 2**20
NAMES = [
    "conv1",
    *(f"layer1.{block}.{part}" for block in range(3) for part in ("convolve", "add")),
    "classify",
]
MODEL = {
    "name": "resnet50",
    "checkpoint": True,
    "data": "photographs",
    "batch_size": 4,
    "size": 224,
    "largest_ratio": 0.9,
}
WHERE = {"device": "A processor", "threads": 2, "torch": "2", "python": "3", "zoo": "1"}
PLACE = ["layer1.0.conv", "zoo/models/resnet.py:47"]
FORWARD = [[0, "forward"], [4, "backward"]]
AGAIN = [[0, "forward"], [4, "backward"], [6, "recompute"], [8, "backward"]]


def timeline(activations: list[int], phases: list[list[Any]]) -> dict[str, Any]:
    """A step in 12 events, the optimizer's from 10 on, with so many MiB of activations at each."""
    sizes = [size * MIB + 12 for size in activations]
    peak = max(range(len(sizes)), key=sizes.__getitem__)
    return {
        "length": 12,
        "allocator": True,
        "points": list(range(len(sizes))),
        # as they come from a file: by name
        "bytes": {"parameters": [3 * MIB] * len(sizes), "saved activations": sizes},
        "phases": [*phases, [10, "optimizer"]],
        "places": {"names": [["", ""], PLACE], "at": [0, *[1] * (len(sizes) - 1)]},
        "peak": {
            "point": peak,
            "bytes": sizes[peak] + 3 * MIB,
            "phase": "backward",
            "categories": {"parameters": 3 * MIB, "saved activations": sizes[peak]},
        },
        "holders": [
            {
                "bytes": 2 * MIB + 5,
                "category": "saved activations",
                "shape": [4, 64, 56, 56],
                "dtype": "float32",
                "place": "layer1.0.convolve",
                "phase": "forward",
                "line": "zoo/models/resnet.py:47",
            }
        ],
    }


def record(kind: str, activations: list[int], loss: str, **more: Any) -> dict[str, Any]:
    """A cell's record; its activations peak at 12 bytes more than the most MiB of them.

    Two of them are those of a kernel's workspace. An optimizer in the backward leaves no gradients,
    and the allocator cannot say which of its blocks they were.
    """
    drawn = timeline(activations, FORWARD if kind == "baseline" else AGAIN)
    most = max(activations) * MIB
    in_backward = kind == "optimizer_in_backward"
    gradients = {} if in_backward else {"gradients": "a"}
    return {
        "status": "done",
        "kind": kind,
        "parameters": 25_557_032,
        "memory": {
            "peak": drawn["peak"]["bytes"],
            **({} if in_backward else {"activation_peak": most + 12}),
            "tensor_peak": drawn["peak"]["bytes"] - 2,
            "tensor_activation_peak": most + 10,
        },
        "digests": [{"loss": "a", **gradients}, {"loss": loss, **gradients}],
        "environment": WHERE,
        "cell": {"device": "cpu", "dtype": "float32", "seed": 0, "steps": 2},
        "finished": "2026-01-01T00:00:00+00:00",
        "timeline": drawn,
        "missing": {},
        **more,
    }


def frontier() -> dict[str, Any]:
    """Three plans and two schemes."""
    return {
        "optimal": [[6 * MIB, 1.5], [8 * MIB + 7, 1.25], [13 * MIB, 1.0]],
        "schemes": {"blocks": [9 * MIB, 1.3], "sqrt": [8 * MIB, 1.4]},
        "baseline": 13 * MIB,
        "lower_bound": 5 * MIB,
    }


def comparison(loss: str = "a", name: str = "resnet50", **cells: Any) -> dict[str, Any]:
    """A model's records; a loss other than "a" is one of the checkpointed model that differs."""
    saved = [(number + 1) * MIB for number in range(len(NAMES))]
    lines = {"zoo/models/resnet.py:47": [1, 3, 5], "zoo/models/resnet.py:52": [2, 4, 6]}
    chain = {"names": NAMES, "blocks": [0, 1, 1, 2, 2, 3, 3, 4], "saved": saved, "lines": lines}
    baseline = record("baseline", [1, 4, 6, 8, 10, 9, 7, 6, 4, 3, 2, 1], "a")
    checkpointed = record("checkpointed", [1, 2, 2, 3, 4, 3, 4, 5, 4, 3, 2, 1], loss)
    third = record("optimizer_in_backward", [1, 2, 2, 3, 3, 2, 3, 4, 3, 2, 2, 1], "a")
    for cell in (baseline, checkpointed, third):
        chosen = {"name": name, "checkpoint": cell["kind"] != "baseline"}
        cell["cell"] = cell["cell"] | {"model": MODEL | chosen}
    return {
        "model": MODEL | {"name": name},
        "baseline": baseline | {"plan": None, "steps": chain, "frontier": frontier()},
        "checkpointed": checkpointed | {"plan": "0 (1-3 (4-5)) 6-7"},
        "optimizer_in_backward": third | {"plan": "0 (1-3 (4-5)) 6-7"},
        "timing": {
            "status": "done",
            "step_seconds": {
                "baseline": [1.0, 2.0, 4.0],
                "checkpointed": [1.5, 2.2, 5.2],
                "optimizer_in_backward": [1.4, 2.4, 5.0],
            },
        },
        **cells,
    }


def graph(kind: str, digests: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    """A record of a variant as a CUDA graph."""
    chosen = {"name": MODEL["name"], "checkpoint": kind != "baseline_graph"}
    cell = {"device": "cuda", "dtype": "float32", "seed": 0, "steps": 2, "model": MODEL | chosen}
    memory = {"peak": 3 * MIB, "reserved_peak": 5 * MIB}
    seconds = {"memory": memory, "digests": digests, "replay_seconds": [0.5, 0.5, 2.0]}
    return {
        "status": "done",
        "kind": kind,
        "parameters": 25_557_032,
        "cell": cell,
        **seconds,
        **more,
    }


def with_graphs(found: dict[str, Any], **cells: Any) -> dict[str, Any]:
    """A comparison with its variants as CUDA graphs."""
    kinds = ("baseline", "checkpointed", "optimizer_in_backward")
    graphs = {f"{kind}_graph": graph(f"{kind}_graph", found[kind]["digests"]) for kind in kinds}
    return found | graphs | cells


def on_gpu(found: dict[str, Any]) -> dict[str, Any]:
    """A comparison as a GPU's, of invented numbers: with reserved memory and CUDA graphs."""
    kinds = ("baseline", "checkpointed", "optimizer_in_backward")
    sizes = {kind: found[kind]["memory"] for kind in kinds}
    reserved = {
        kind: found[kind] | {"memory": size | {"reserved_peak": size["peak"] + 2 * MIB}}
        for kind, size in sizes.items()
    }
    return with_graphs(found | reserved)


def older(found: dict[str, Any]) -> dict[str, Any]:
    """A comparison from before there was a third variant."""
    found = {kind: part for kind, part in found.items() if kind != "optimizer_in_backward"}
    seconds = found["timing"].get("step_seconds", {})
    pair = {kind: seconds[kind] for kind in seconds if kind != "optimizer_in_backward"}
    return found | {"timing": found["timing"] | ({"step_seconds": pair} if pair else {})}


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """A comparison whose cells recorded nothing to draw, as older ones did not."""
    extras = ("timeline", "steps", "frontier", "missing")
    return {
        kind: {key: value for key, value in part.items() if key not in extras}
        for kind, part in found.items()
    }
