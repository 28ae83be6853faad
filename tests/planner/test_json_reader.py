"""JSON from outside: every fault is an error of zoo's that says which field, at any stack depth."""

import copy
import json
import pickle
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import zoo
from tests.policy.test_plan_report import curve, report
from zoo import Plan, PlanReport
from zoo.errors import ArgumentError, FileError, PlanError, ZooError
from zoo.planner.json_reader import DEEPEST, LONGEST, read, read_json
from zoo.policy.plan_report import Frontier
from zoo.profiling.timeline import Allocation, Mark, Timeline


def timeline() -> Timeline:
    mine = Allocation(64, 1, 2, "saved activations", "forward", "fc", shape=(4, 4))
    return Timeline("Net", "cpu", 2, False, "", [Mark(0, "forward")], [mine])


WRITTEN = {
    "plan": (Plan(((0, 1), 2)), Plan),
    "report": (report(), PlanReport),
    "frontier": (curve(), Frontier),
    "timeline": (timeline(), Timeline),
}
KINDS = [kind for _, kind in WRITTEN.values()]
FILES = [name for name in WRITTEN if name != "plan"]


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Whole:
    count: int
    ratio: float
    limit: int | None
    parts: tuple[Part, ...]
    done: bool = False
    notes: list[str] = field(default_factory=list)


GOOD = {"count": 1, "ratio": 2, "limit": None, "parts": [{"name": "a", "sizes": [1, 2]}]}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_reads_back(name: str) -> None:
    value, kind = WRITTEN[name]
    found = kind.from_json(value.to_json())
    assert found == value
    assert found.to_json() == value.to_json()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 900 + "0" + "]" * 900, "nest 900 deep; at most 512"),
        ('{"plan":' * 100_000, "nest 100000 deep; at most 512"),
        ("[" + "9" * 5000 + "]", "5000 digits; at most 30"),
        ('{"plan": [-' + "9" * 400 + "]}", "401 digits; at most 30"),
        ("[NaN]", "holds NaN, which JSON does not have"),
        ("", "Expecting value"),
        ('"' + "x" * 100_000 + '"', "no .* in JSON: .{1,220}$"),
        (None, "not text but a value of type NoneType"),
        (b"[0]", "not text but a value of type bytes"),
    ],
    ids=["brackets", "braces", "digits", "negative", "nan", "empty", "long", "none", "bytes"],
)
def test_no_text_raises_anything_but_an_error_of_ours(kind: Any, text: Any, message: str) -> None:
    with pytest.raises(ZooError, match=message):
        kind.from_json(text)


def test_the_depth_that_is_read_does_not_depend_on_the_caller() -> None:
    def verdict(calls: int, brackets: int) -> str:
        if calls:
            return verdict(calls - 1, brackets)
        try:
            return str(read_json("[" * brackets + "]" * brackets, "list", ZooError, type))
        except ZooError:
            return "refused"

    room = sys.getrecursionlimit() - DEEPEST - 150
    for calls in (0, room):
        assert verdict(calls, DEEPEST) == "<class 'list'>"
        assert verdict(calls, DEEPEST + 1) == "refused"


def test_brackets_in_texts_do_not_count() -> None:
    for text in ("[" * 1000, '"' + "[" * 1000, "\\" + "]" * 1000, "\\"):
        assert read_json(json.dumps([text]), "list", ZooError, list) == [text]


def test_a_text_without_end_is_measured_in_a_moment() -> None:
    with pytest.raises(PlanError, match="Unterminated string"):
        Plan.from_json('"' + '\\"' * 500_000)


def faulty(values: Any) -> Any:
    """Yields a JSON value with each of its parts taken out, or replaced, in turn."""
    strange = (None, "x", -1.5, True, [], {}, [None], {"a": 1})
    yield from strange
    if isinstance(values, dict):
        for key, value in values.items():
            yield {name: values[name] for name in values if name != key}
            yield from ({**values, key: other} for other in faulty(value))
        yield {**values, "unknown": 1}
    elif isinstance(values, list):
        for place, value in enumerate(values[:3]):
            yield values[:place] + values[place + 1 :]
            yield from ([*values[:place], other, *values[place + 1 :]] for other in faulty(value))


@pytest.mark.parametrize("name", FILES)
def test_what_is_read_can_be_shown_and_written(name: str) -> None:
    value, kind = WRITTEN[name]
    refused = 0
    for values in faulty(json.loads(value.to_json())):
        try:
            found = kind.from_json(json.dumps(values))
        except ZooError:
            refused += 1
            continue
        assert str(found)
        assert kind.from_json(found.to_json()) == found
    assert refused > 100


@pytest.mark.parametrize("count", [0, -1, 10 ** (LONGEST - 1), 1 - 10 ** (LONGEST - 1)])
def test_numbers_of_any_size_that_is_read_can_be_shown(count: int) -> None:
    for found, names in ((report(), ("predicted_peak", "baseline_peak", "flops", "least_peak")),
                         (curve(), ("lower_bound",))):  # fmt: skip
        values = {**json.loads(found.to_json()), **dict.fromkeys(names, count)}
        assert str(type(found).from_json(json.dumps(values)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": None}, "count takes a whole number; got None"),
        ({"count": True}, "count takes a whole number; got True"),
        ({"count": 1.0}, r"count takes a whole number; got 1\.0"),
        ({"ratio": "2"}, "ratio takes a number; got '2'"),
        ({"ratio": float("inf")}, "ratio takes a number; got inf"),
        ({"limit": "much"}, "limit takes a whole number; got 'much'"),
        ({"parts": {}}, r"parts takes a list; got \{\}"),
        ({"parts": [5]}, "parts it takes named fields; got 5"),
        ({"parts": [{"name": "a"}]}, "parts it lacks sizes"),
        ({"parts": [{"name": "a", "sizes": [1, "x"]}]}, "parts sizes takes a whole number; got"),
        ({"done": 1}, "done takes true or false; got 1"),
        ({"cuont": 1}, r"no field 'cuont'\. Did you mean count\?"),
    ],
    ids=str,
)
def test_a_field_of_another_type_is_named(change: dict[str, Any], message: str) -> None:
    assert read(Whole, GOOD) == Whole(1, 2.0, None, (Part("a", (1, 2)),))
    with pytest.raises(ValueError, match=message):
        read(Whole, {**GOOD, **change})


def test_fields_that_are_missing_are_listed() -> None:
    with pytest.raises(ValueError, match="it lacks count, ratio, limit, parts"):
        read(Whole, {})


def test_a_report_whose_lists_are_not_those_of_its_plan_is_refused() -> None:
    values = json.loads(report().to_json())
    for name in ("names", "blocks", "saved"):
        changed = {**values, name: values[name][1:]}
        with pytest.raises(PlanError, match=f"has 14 steps, its {name} are those of 13"):
            PlanReport.from_json(json.dumps(changed))


def test_a_timeline_has_no_points_that_its_events_do_not_make() -> None:
    values = json.loads(timeline().to_json())
    for change in ({"length": 10**12}, {"length": -1}, {"length": 1}, {"allocations": []}):
        with pytest.raises(ArgumentError, match=r"cannot make -?\d+ events|at point 2, but"):
            Timeline.from_json(json.dumps({**values, **change}))


def test_a_plan_and_a_report_of_one_are_told_apart() -> None:
    with pytest.raises(PlanError, match=r"as a plan without its costs is; zoo\.Plan\.from_js"):
        PlanReport.from_json(report().plan.to_json())
    with pytest.raises(PlanError, match=r"its costs, which zoo\.PlanReport\.from_json reads"):
        Plan.from_json(report().to_json())


@pytest.mark.parametrize("load", [PlanReport.load, zoo.Timeline.load])
def test_a_file_that_cannot_be_read_is_named(load: Any, tmp_path: Any) -> None:
    (tmp_path / "picture.json").write_bytes(b"\x89PNG\xff")
    for path, reason in (
        (tmp_path / "no.json", "no.json' cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "picture.json", "cannot be read: it is not text"),
        ("a\0b", "cannot be read: .*null byte"),
        (None, "'None' cannot be read"),
    ):
        with pytest.raises(FileError, match=reason) as caught:
            load(path)
        assert isinstance(caught.value, OSError)


def test_many_levels_of_a_plan_do_not_stop_its_methods() -> None:
    nested: tuple[Any, ...] = (499,)
    for step in reversed(range(499)):
        nested = (step, nested)
    plan = Plan((nested,))
    assert plan.depth() == 500
    assert Plan.parse(plan.text()) == Plan.from_json(plan.to_json()) == plan
    assert len(plan.runs()) == len(plan.draw().splitlines()) == 500
    assert plan.flatten() == tuple(range(500))
    assert str(plan).startswith("500 steps")
    assert repr(plan).count("(") == 502
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan
    many = (1,) * 500
    found = replace(report(), plan=plan, names=("a",) * 500, blocks=many, saved=many)
    assert PlanReport.from_json(found.to_json()) == found
