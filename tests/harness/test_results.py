"""A bad line of results costs only itself: whatever stands in it, all others are reported."""

import copy
import json
import re

import pytest

from tests.harness.command_line import load
from tests.report.recorded import WHERE, comparison, with_graphs
from zoo.errors import LONGEST
from zoo.harness.comparison_cells import GRAPHS, KINDS
from zoo.harness.results import Results, comparisons, parse
from zoo.report.html_page import page
from zoo.report.rows import differences, heading
from zoo.report.two_runs import two_runs

MISSING = object()
BAD = [
    MISSING, None, True, "nonsense", "\ud800", "\x1b[31m$\\frac$|</script>/", 0, -1, 0.5, 10**400,
    float("nan"), [], [[]], [0], {}, {"a": {}},
]  # fmt: skip


def records(name="resnet18", **model):
    """What a comparison leaves, with all that a report draws."""
    (config,) = load(["--model", "resnet18"]).models
    shown = {"name": name, "largest_ratio": 1.0, "size": config.size, "arguments": {"classes": 3}}
    given = {"data": config.data, "batch_size": 4, "checkpoint": True, **shown, **model}
    cell = {"device": "cpu", "dtype": "float32", "seed": 0, "steps": 2, "model": given}
    found = with_graphs(comparison())
    for kind in (*KINDS, *GRAPHS):
        found[kind] |= {"key": f"{given} {kind}", "kind": kind, "cell": cell, "seconds": 1.0}
    found["timing"] |= {"environment": WHERE}
    return [copy.deepcopy(found[kind]) for kind in (*KINDS, *GRAPHS)]


def places(value, path=()):
    """Every place in a record, and the first of each list."""
    yield path
    parts = enumerate(value[:1]) if isinstance(value, list) else ()
    for name, part in value.items() if isinstance(value, dict) else parts:
        yield from places(part, (*path, name))


def changed(record, path, value):
    found = copy.deepcopy(record)
    *before, last = path
    place = found
    for name in before:
        place = place[name]
    if value is MISSING:
        del place[last]
    else:
        place[last] = value
    return found


def mutants():
    """Records with one thing changed, each in its place among the four of a comparison."""
    for kind, whole in enumerate(records()):
        for number, path in enumerate(places(whole)):
            for bad in BAD if path else ():
                yield number, kind, changed(whole, path, bad)


def fault_of(record):
    try:
        parse(json.dumps(record))
    except ValueError as fault:
        return str(fault)


def test_whatever_a_line_holds_it_is_a_record_or_says_what_is_wrong():
    faults = [fault_of(mutant) for _, _, mutant in mutants()]
    assert fault_of(None) == "it should be an object; got None"
    assert {fault_of(record) for record in records()} == {None}
    assert all(fault is None or 0 < len(fault) < 2 * LONGEST for fault in faults)
    assert faults.count(None) < len(faults) / 4


def test_what_is_taken_for_a_record_is_reported():
    """One in so many: of each takes half a second."""
    taken = [entry for entry in mutants() if fault_of(entry[-1]) is None]
    for _, kind, mutant in taken[::80]:
        found = [*records()[:kind], mutant, *records()[kind + 1 :]]
        put_together = comparisons(found)
        runs = two_runs(put_together, comparisons(records()), "earlier")
        page(put_together, heading(put_together, "mine", "zoo compare"), runs)


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (["kind"], MISSING, "kind is missing"),
        (["status"], MISSING, "status is missing"),
        (
            ["status"],
            "nonsense",
            "status should be 'done', 'failed', 'does not fit' or 'refused'; got 'nonsense'",
        ),
        (["status"], "failed", "reason is missing"),
        (["memory"], MISSING, "memory is missing"),
        (["memory", "peak"], float("nan"), "memory.peak should be a valid integer; got nan"),
        (["memory", "activation_peak"], MISSING, "memory.activation_peak is missing"),
        (
            ["memory", "tensor_activation_peak"],
            "1",
            "tensor_activation_peak should be a valid integer",
        ),
        (["cell", "model", "optimizer"], 5, "cell.model.optimizer should be a valid string; got 5"),
        (["digests"], [], "digests is missing"),
        (["cell", "model", "name"], MISSING, "cell.model.name is missing"),
        (["cell", "model", "checkpoint"], MISSING, "cell.model.checkpoint is missing"),
        (
            ["cell", "model", "largest_ratio"],
            float("nan"),
            "largest_ratio should be a finite number; got nan",
        ),
        (["environment"], 5, "environment should be an object; got 5"),
        (["missing"], 5, "missing should be an object; got 5"),
        (["steps", "blocks"], [0], "steps holds lists of unequal lengths"),
        (["steps", "lines"], {"a.py:1": [8]}, "steps.lines holds an index out of range"),
        (["timeline", "places", "names"], [], "timeline.places holds an index out of range"),
        (["timeline", "places", "at"], [0], "timeline holds lists of unequal lengths"),
        (["steps", "saved", 0], "1", "steps.saved.0 should be a valid integer; got '1'"),
        (["plan"], "(0-1", r"^plan is wrong: the plan '\(0-1' leaves"),
        (["timeline", "holders", 0, "shape"], MISSING, "timeline.holders.0.shape is missing"),
        (["key"], "\ud800", "it is no JSON"),
    ],
)
def test_a_fault_names_the_key(path, value, fault):
    assert re.search(fault, fault_of(changed(records()[0], path, value)))


def nested(depth):
    return f'{{"key": {"[" * depth}{"]" * depth}}}'


LINES = ["[" * 100_000, nested(100), nested(900), nested(100_000), "5", "null", "[]", '"text"',
         "{}", '{"key": 5}', '{"key": []}', '{"key": "a"}', f'{{"key": {"9" * 5_000}}}',
         "\x00"]  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:20])
def test_one_bad_line_loses_no_file(tmp_path, line):
    file = Results(tmp_path / "mine.jsonl")
    for record in records():
        file.append(record)
    whole = file.path.read_text()
    file.path.write_text(f"{line}\n{whole}{line}\n")
    said = []
    assert list(file.read(said.append)) == [record["key"] for record in records()]
    assert [text.split(" is passed")[0] for text in said] == [
        f"{file.path}, line {number}," for number in (1, 2 + len(records()))
    ]


def test_a_step_that_one_run_lacks_is_not_equal():
    assert differences([{"loss": "a"}] * 2, [{"loss": "a"}]) == ["loss from step 2 on"]
    assert differences([{"loss": "a"}], [{"loss": "a", "rng": "b"}]) == ["rng from step 1 on"]


def test_a_baseline_that_was_trained_again_belongs_to_its_comparison():
    found = records()
    second = copy.deepcopy(found[0]) | {"kind": "baseline_again", "key": "second"}
    (whole,) = comparisons([*found, parse(json.dumps(second))])
    assert whole["baseline_again"]["key"] == "second"
    (alone,) = comparisons([found[0], second], partial=True)
    assert alone["baseline"] == found[0]
