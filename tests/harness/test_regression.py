"""`--compare` fails when a peak has grown by more than the tolerance, or is not there any more."""

import io
import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from zoo.errors import ConfigError
from zoo.harness.cells import KINDS, expand
from zoo.harness.config import Config, ModelConfig
from zoo.harness.regression import has_grown, judge, read_earlier, subject

MODEL = ModelConfig("resnet18", "photographs", 2, 32, {"drop_rate": 0.1, "classes": 10})
CONFIG = Config("mine", (MODEL,), threads=1)
EVEN = {"median": 1.0, "lower": 1.0, "upper": 1.0}
WHERE = {"torch": "2.14.1", "threads": 1}
VARIANTS = ("baseline", "checkpointed", "optimizer_in_backward")
RATIOS = ("ratio", "optimizer_in_backward_ratio")


def records(config=CONFIG, peak=1000, **changes):
    """Returns what a run of the config would have left, all its peaks alike."""
    return [
        {
            "key": cell.key(),
            "kind": kind,
            "cell": json.loads(json.dumps(asdict(cell), sort_keys=True)),
            "status": "done",
            "seconds": 1.0,
            "step_seconds": {variant: [1.0] for variant in VARIANTS},
            "spread": dict.fromkeys((*VARIANTS, *RATIOS), EVEN),
            "environment": WHERE,
            **({} if kind == "timing" else {"memory": memory(kind, peak)}),
            "digests": [{"loss": "a"}],
            **changes,
        }
        for entry in expand(config)
        for kind, cell in entry.items()
    ]


def memory(kind, peak):
    """Returns what a cell measures; the optimizer in the backward has no activation peak."""
    activations = {} if kind == "optimizer_in_backward" else {"activation_peak": 10}
    return {"peak": peak, **activations}


def older(found):
    """Returns records without the third variant, as earlier versions left them."""
    return [record for record in found if record["kind"] != "optimizer_in_backward"]


def judged(before, after, tolerance=0.01):
    changes, _ = judge({subject(record): record for record in before}, after, tolerance)
    return any(change.fault for change in changes), [change.text for change in changes]


def test_nothing_changed_is_nothing_to_say():
    assert judged(records(), records()) == (False, [])


@pytest.mark.parametrize(
    ("peak", "tolerance", "fails"),
    [(1010, 0.01, False), (1011, 0.01, True), (1011, 0.02, False), (1001, 0, True), (1, 0, False)],
)
def test_a_peak_may_grow_by_the_tolerance_and_shrink_at_will(peak, tolerance, fails):
    failed, texts = judged(records(), records(peak=peak), tolerance)
    assert failed == fails
    assert len(texts) == 3
    assert texts[2].startswith("resnet18 optimizer in backward: step peak")
    assert texts[0].startswith(f"resnet18 baseline: step peak 1000 B → {peak} B, {peak - 1000:+,}")
    assert ("more than the tolerance" in texts[0]) == fails


@pytest.mark.parametrize(
    ("status", "words"), [("does not fit", "no longer fits"), ("failed", "now fails")]
)
def test_a_peak_that_is_not_there_any_more_is_worse(status, words):
    after = records(status=status, reason="why")
    for record in after:
        record.pop("memory", None)
    failed, texts = judged(records(), after)
    assert failed
    assert texts[0] == f"resnet18 baseline {words}: why"


def test_what_fits_now_is_said_and_no_fault():
    before = records(status="does not fit", reason="why")
    assert judged(before, records()) == (
        False,
        [f"resnet18 {kind.replace('_', ' ')} fits now" for kind in KINDS],
    )


def test_other_bits_and_surroundings_are_said_and_no_fault():
    after = records(digests=[{"loss": "b"}], environment=WHERE | {"torch": "2.15.0"})
    failed, texts = judged(records(), after)
    assert not failed
    assert texts[0] == "measured elsewhere: torch 2.14.1 → 2.15.0"
    assert texts[1] == "resnet18 baseline: other bits in loss from step 1 on"


@pytest.mark.parametrize(("lower", "said"), [(1.15, 0), (1.25, 4)])
def test_a_time_is_said_when_the_quartiles_do_not_meet(lower, said):
    before = records(spread={"ratio": {"median": 1.1, "lower": 1.0, "upper": 1.2}})
    after = records(spread={"ratio": {"median": 1.3, "lower": lower, "upper": 1.4}})
    failed, texts = judged(before, after)
    assert (failed, len(texts)) == (False, said)


@pytest.mark.parametrize(
    ("change", "same"),
    [({"batch_size": 3}, False), ({"checkpoint": "sqrt"}, False), ({"repeats": 9}, True)],
)
def test_a_subject_is_what_was_measured_not_how(change, same):
    other = replace(CONFIG, models=(replace(MODEL, **change),), steps=9, threads=2)
    found = [subject(record) for record in records(other)]
    assert (found[1] == subject(records()[1])) == same


def write(path, found):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in found))
    return str(path)


@pytest.mark.parametrize(("peak", "worse"), [(1000, False), (2000, True)])
def test_a_run_is_compared_with_the_file_that_its_config_names(tmp_path, peak, worse):
    path = write(tmp_path / "old.jsonl", [*records(peak=1), *records()])
    config = replace(CONFIG, compare=path)
    console = Console(file=io.StringIO(), width=200)
    after = dict(zip(KINDS, records(peak=peak), strict=True))
    assert has_grown(read_earlier(config), [after], path, 0.01, console) == worse
    assert "old.jsonl: 5 peaks, tolerance 1.00%: " in console.file.getvalue()


def test_a_file_from_before_the_third_variant_is_compared_with_the_others(tmp_path):
    path = write(tmp_path / "old.jsonl", older(records()))
    config = replace(CONFIG, compare=path)
    for peak in (1000, 2000):
        console = Console(file=io.StringIO(), width=200)
        after = dict(zip(KINDS, records(peak=peak), strict=True))
        assert has_grown(read_earlier(config), [after], path, 0.01, console) == (peak == 2000)
        printed = console.file.getvalue()
        assert "resnet18 optimizer in backward was not measured before" in printed
        assert "old.jsonl: 4 peaks, tolerance 1.00%: " in printed


def test_a_run_without_the_third_variant_is_compared_with_one_that_has_it(tmp_path):
    path = write(tmp_path / "old.jsonl", records())
    config = replace(CONFIG, optimizer_in_backward=False, compare=path)
    after = {record["kind"]: record for record in records(config)}
    console = Console(file=io.StringIO(), width=200)
    assert not has_grown(read_earlier(config), [after], path, 0.01, console)
    assert "4 peaks, tolerance 1.00%: nothing worse" in console.file.getvalue()


def test_the_time_of_each_variant_is_said():
    slow = {"median": 2.0, "lower": 1.9, "upper": 2.1}
    after = records(spread={"ratio": EVEN, "optimizer_in_backward_ratio": slow})
    _, texts = judged(records()[-1:], after[-1:])
    assert texts == ["resnet18 timing: step time with the optimizer in the backward ×1.00 → ×2.00"]


def test_no_file_to_compare_with_compares_nothing():
    assert read_earlier(CONFIG) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ([], "holds no result; give the .jsonl of a run"),
        ([{"key": "a", "status": "failed"}], "holds no result"),
        (records(replace(CONFIG, dtype="bfloat16")), "holds none of these cells .*with resnet18"),
    ],
)
def test_a_file_that_compares_nothing_is_refused_before_anything_runs(tmp_path, content, message):
    path = tmp_path / "old.jsonl"
    if content is not None:
        write(path, content)
    with pytest.raises(ConfigError, match=message):
        read_earlier(replace(CONFIG, compare=str(path)))


def test_a_line_that_broke_off_is_passed_over(tmp_path):
    path = tmp_path / "old.jsonl"
    write(path, records())
    path.write_text(path.read_text() + '{"key": "b", "cel')
    assert len(read_earlier(replace(CONFIG, compare=str(path)))) == 4
