"""`--compare` fails when a peak has grown by more than the tolerance, or is not there any more."""

import io
import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from zoo.cli.comparison import beside, read_earlier
from zoo.errors import ConfigError
from zoo.harness.comparison_cells import expand
from zoo.harness.config import Config, ModelConfig
from zoo.harness.results import comparisons
from zoo.report.text_report import has_grown
from zoo.report.two_runs import subject, two_runs

MODEL = ModelConfig("resnet18", "photographs", 2, 32, {"drop_rate": 0.1, "classes": 10})
CONFIG = Config("mine", (MODEL,), threads=1)
NAME = "resnet18 (classes=10, drop_rate=0.1)"
WHERE = {"torch": "2.14.1", "threads": 1}
VARIANTS = ("baseline", "checkpointed", "optimizer_in_backward")


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
    console = Console(file=io.StringIO(), width=300)
    runs = two_runs(comparisons(after), comparisons(before), "old.jsonl")
    failed = has_grown(runs, tolerance, console)
    *texts, end = console.file.getvalue().splitlines()
    assert end.startswith("compared with old.jsonl: ")
    return failed, texts


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
    assert texts[2].startswith(f"{NAME} + optimizer in backward: step peak")
    share = f"{peak / 10 - 100:+.2f} %".replace("-", "−")
    start = f"{NAME} baseline: step peak 1000 B → {peak} B ({share}), {peak - 1000:+,} bytes"
    assert texts[0].startswith(start)
    assert ("more than the tolerance" in texts[0]) == fails


@pytest.mark.parametrize(("status", "words"), [("does not fit", "does not fit"), ("failed", "—")])
def test_a_peak_that_is_not_there_any_more_is_worse(status, words):
    after = records(status=status, reason="why")
    for record in after:
        record.pop("memory", None)
    failed, texts = judged(records(), after)
    assert failed
    assert f"{NAME} baseline: step peak 1000 B → {words}: why" in texts


def test_a_timing_that_alone_does_not_fit_any_more_is_worse():
    after = records()
    for record in after:
        if record["kind"] == "timing":
            record |= {"status": "does not fit", "reason": "why", "step_seconds": {}}
    failed, texts = judged(records(), after)
    assert failed
    assert texts == [f"{NAME} timing does not fit: why"]


def test_what_an_interrupted_run_measured_is_compared(tmp_path):
    old = [record for record in records() if record["kind"] in ("baseline", "timing")]
    path = write(tmp_path / "old.jsonl", old)
    console = Console(file=io.StringIO(), width=300)
    earlier = read_earlier(replace(CONFIG, compare=path))
    assert has_grown(beside(comparisons(records(peak=1020)), earlier), 0.01, console)
    text = console.file.getvalue()
    assert f"{NAME} baseline: step peak 1000 B → 1020 B" in text
    assert "baseline was not measured before" not in text


def test_what_fits_now_is_said_and_no_fault():
    before = records(status="does not fit", reason="why")
    for record in before:
        record.pop("memory", None)
    failed, texts = judged(before, records())
    assert not failed
    assert texts[0] == f"{NAME} baseline: step peak does not fit → 1000 B"


def test_other_bits_and_surroundings_are_said_and_no_fault():
    after = records(digests=[{"loss": "b"}], environment=WHERE | {"torch": "2.15.0"})
    failed, texts = judged(records(), after)
    assert not failed
    assert texts[0] == "measured elsewhere: torch 2.14.1 → 2.15.0"
    assert texts[1] == f"{NAME} baseline: other bits in loss from step 1 on"
    assert judged(records(), records(replace(CONFIG, seed=3), digests=[{"loss": "b"}]))[1] == []


def timed(checkpointed, in_backward=1.0):
    """Records of five pairs of steps, whose ratios are spread by a tenth around the given ones."""
    around = [-0.1, -0.05, 0, 0.05, 0.1]
    seconds = {"checkpointed": checkpointed, "optimizer_in_backward": in_backward}
    found = {name: [ratio + one for one in around] for name, ratio in seconds.items()}
    return records(step_seconds={"baseline": [1.0] * 5, **found})


@pytest.mark.parametrize(("ratio", "said"), [(1.25, 0), (1.35, 1)])
def test_a_time_is_said_when_the_quartiles_do_not_meet(ratio, said):
    failed, texts = judged(timed(1.2), timed(ratio))
    assert (failed, len(texts)) == (False, said)


def test_the_time_of_each_variant_is_said():
    _, texts = judged(timed(1.2, 1.0), timed(1.2, 2.0))
    name = f"{NAME} + optimizer in backward"
    assert texts == [f"{name}: step time ×1.00 → ×2.00 (+100.00 %)"]


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
    runs = beside(comparisons(records(peak=peak)), read_earlier(config))
    assert has_grown(runs, 0.01, console) == worse
    assert "old.jsonl: 5 peaks, tolerance 1.00%: " in console.file.getvalue()


def test_a_file_from_before_the_third_variant_is_compared_with_the_others(tmp_path):
    path = write(tmp_path / "old.jsonl", older(records()))
    config = replace(CONFIG, compare=path)
    for peak in (1000, 2000):
        console = Console(file=io.StringIO(), width=200)
        runs = beside(comparisons(records(peak=peak)), read_earlier(config))
        assert has_grown(runs, 0.01, console) == (peak == 2000)
        printed = console.file.getvalue()
        assert f"{NAME} + optimizer in backward, 2×32×32 was not measured before" in printed
        assert "old.jsonl: 4 peaks, tolerance 1.00%: " in printed


def test_a_run_without_the_third_variant_is_compared_with_one_that_has_it(tmp_path):
    path = write(tmp_path / "old.jsonl", records())
    config = replace(CONFIG, optimizer_in_backward=False, compare=path)
    console = Console(file=io.StringIO(), width=200)
    assert not has_grown(beside(comparisons(records(config)), read_earlier(config)), 0.01, console)
    assert "4 peaks, tolerance 1.00%: nothing worse" in console.file.getvalue()


def test_no_file_to_compare_with_compares_nothing():
    assert read_earlier(CONFIG) is None


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
    assert len(read_earlier(replace(CONFIG, compare=str(path))).records) == 4
