"""The report's numbers are those of the records, and it fails when one of them is not good."""

import csv
import io
import re
import statistics

import pytest
from rich.console import Console

from tests.report import recorded
from tests.report.recorded import WHERE, graph, on_gpu, with_graphs
from zoo.report.html_page import page
from zoo.report.rows import GRAPHS, VARIANTS, heading, median, quartiles, rows, variants
from zoo.report.text_report import show, write_report

MODEL = recorded.MODEL | {"largest_ratio": 0.3}
DONE = {"status": "done"}
SECONDS = {"baseline": [1.0, 2.0, 4.0], "checkpointed": [1.5, 2.2, 5.2]}


THIRD = {
    "status": "done",
    "parameters": 25_557_032,
    "memory": {"peak": 10**8, "tensor_peak": 10**8 - 5, "tensor_activation_peak": 250},
    "digests": [{"loss": "a"}, {"loss": "a"}],
}
UNFIT = {"status": "does not fit", "reason": "needs more"}
FAILED = {"status": "failed", "reason": "killed by SIGKILL"}


def record(activation_peak, loss="a", tensors=None, **more):
    return {
        "status": "done",
        "parameters": 25_557_032,
        "memory": {
            "peak": activation_peak * 10**6,
            "activation_peak": activation_peak,
            "tensor_peak": activation_peak + 10**8,
            "tensor_activation_peak": activation_peak if tensors is None else tensors,
        },
        "digests": [{"loss": "a", "gradients": "g"}, {"loss": loss, "gradients": "g"}],
        "environment": WHERE,
        "cell": {"device": "cpu", "dtype": "float32"},
        **more,
    }


def comparison(activation_peak=250, loss="a", **cells):
    return {
        "model": MODEL,
        "baseline": record(1000),
        "checkpointed": record(activation_peak, loss),
        "timing": {"status": "done", "step_seconds": SECONDS},
        **cells,
    }


def three(**cells):
    """A comparison of three variants."""
    third = [1.2, 2.6, 4.4]
    timing = {"status": "done", "step_seconds": SECONDS | {"optimizer_in_backward": third}}
    return comparison(**{"optimizer_in_backward": THIRD, "timing": timing, **cells})


def cells(row, kinds=("baseline", "checkpointed")):
    """A row's cells by their columns."""
    shown = {kind: VARIANTS[kind] for kind in kinds}
    return {column: str(cell) for column, cell in row.cells(shown).items()}


def table(page, name):
    return list(csv.DictReader(page.with_name(name).read_text().splitlines()))


def test_reserved_memory_stands_beside_allocated_where_the_device_has_it():
    baseline, checkpointed = record(1000), record(250)
    baseline["memory"]["reserved_peak"], checkpointed["memory"]["reserved_peak"] = 4000, 1000
    given = [comparison(baseline=baseline, checkpointed=checkpointed), comparison()]
    first, other = map(cells, rows(given))
    assert (first["reserved"], other["reserved"]) == ("3.91 KiB → 1000 B (0.250)", "— → —")
    (on_cpu,) = rows([comparison()])
    assert "reserved" not in cells(on_cpu)
    assert on_cpu.peaks["reserved_peak"] == dict.fromkeys([*VARIANTS, *GRAPHS])


def test_numbers_are_those_of_the_records():
    (row,) = rows([comparison()])
    assert (row.model, row.batch, row.parameters) == ("resnet50", "4×224×224", 25_557_032)
    assert (row.peaks["peak"]["baseline"], row.peaks["peak"]["checkpointed"]) == (10**9, 25 * 10**7)
    assert (row.ratio(peak="activation_peak"), row.exact, row.faults) == (0.25, True, ())
    ratios = row.time_ratios("checkpointed")
    assert ratios == [1.5, 2.2 / 2.0, 5.2 / 4.0]
    assert median(ratios).value == statistics.median(ratios) == pytest.approx(1.3)


def test_a_third_variant_is_measured_against_the_same_baseline():
    (row,) = rows([three()])
    assert row.variants == ["baseline", "checkpointed", "optimizer_in_backward"]
    assert row.peaks["peak"]["optimizer_in_backward"] == 10**8
    assert row.ratio("optimizer_in_backward") == 0.1
    assert row.time_ratios("optimizer_in_backward") == [1.2, 2.6 / 2.0, 4.4 / 4.0]
    assert (row.exact, row.faults) == (True, ())
    # the columns of the whole step come first, then the activations
    found = cells(row, variants([row]))
    assert [*found][3:8] == [
        *("step peak: baseline", "step peak: checkpointed"),
        *("step peak: + optimizer in backward", "activation peak", "without workspaces"),
    ]
    assert found["step peak: baseline"] == "954 MiB"
    assert found["step peak: checkpointed"] == "238 MiB (0.250)"
    assert found["step peak: + optimizer in backward"] == "95.4 MiB (0.100)"
    assert found["activation peak"] == "1000 B → 250 B (0.250)"
    assert found["step time: + optimizer in backward"] == "×1.20 n=3"


@pytest.mark.parametrize("name", ["loss", "parameters", "buffers", "rng"])
def test_a_third_variant_is_compared_in_all_but_its_freed_gradients(name):
    """A digest of it that differs, or that the baseline alone has, is a fault."""
    digests = [{"loss": "a", "gradients": "g", name: "a"}] * 2
    whole = {"baseline": record(1000), "checkpointed": record(250)}
    found = {kind: whole[kind] | {"digests": digests} for kind in whole}
    same = THIRD | {"digests": [{"loss": "a", name: "a"}] * 2}
    assert rows([three(**found, optimizer_in_backward=same)])[0].exact is True
    other = THIRD | {"digests": [{"loss": "a", name: "a"}, {"loss": "a", name: "b"}]}
    lacking = THIRD | {"digests": [{}, {}]} if name == "loss" else THIRD
    for third, step in ((other, 2), (lacking, 1)):
        (row,) = rows([three(**found, optimizer_in_backward=third)])
        assert row.exact is False
        (fault,) = row.faults
        assert fault.startswith("resnet50 with the optimizer in the backward is not exact: it ")
        assert f"{name} from step {step} on" in fault


def test_graphs_stand_beside_the_eager_steps():
    found = cells(rows([with_graphs(three())])[0], VARIANTS)
    peaks = "3.00 MiB → 3.00 MiB → 3.00 MiB (0.003)"
    assert [*found.items()][-4:-1] == [
        ("as CUDA graphs: step peak", peaks),
        ("as CUDA graphs: reserved", "5.00 MiB → 5.00 MiB → 5.00 MiB"),
        # of 0.5 / 1, 0.5 / 2 and 2 / 4
        ("as CUDA graphs: step time", "×0.50 → ×0.50 → ×0.50"),
    ]
    assert found["exact"] == "yes"
    assert not [name for name in cells(rows([three()])[0], VARIANTS) if "graph" in name]


def test_graphs_are_in_each_file_of_a_report(tmp_path):
    found = [with_graphs(three()), three()]
    written = write_report(rows(found), heading(found, "mine", "command"), tmp_path)
    assert " as CUDA graphs: reserved |" in written.read_text()
    first, other = table(written, "models.csv")
    assert first["peak_bytes_checkpointed_graph"] == str(3 * 2**20)
    assert first["reserved_peak_bytes_checkpointed_graph"] == str(5 * 2**20)
    assert first["time_ratio_median_baseline_graph"] == "0.5"
    assert other["peak_bytes_baseline_graph"] == ""
    assert table(written, "timings.csv")[0]["seconds_checkpointed_graph"] == "0.5"
    assert "ring: a replay as a CUDA graph" in written.with_name("comparison.svg").read_text()


def test_a_graph_of_other_numbers_is_a_fault():
    other = graph("checkpointed_graph", [{"loss": "a"}, {"loss": "b"}])
    (row,) = rows([with_graphs(three(), checkpointed_graph=other)])
    assert row.exact is False
    assert row.faults == (
        "resnet50 checkpointed as a CUDA graph is not exact: it differs in gradients from step 1 "
        "on, loss from step 2 on",
    )


def test_a_graph_that_is_refused_is_a_sentence_and_no_fault():
    refused = {"status": "refused", "reason": "the step reads numbers of a tensor"}
    given = [with_graphs(three(), baseline_graph=refused), three()]
    first, other = rows(given)
    assert (first.exact, first.faults) == (True, ())
    sentence = "resnet50 baseline as a CUDA graph is refused: the step reads numbers of a tensor"
    assert first.notes == (sentence,)
    column = "as CUDA graphs: step time"
    assert cells(first)[column] == "refused → ×0.50 → ×0.50"
    assert cells(first)["as CUDA graphs: step peak"].startswith("refused → 3.00 MiB")
    assert cells(other)[column] == "— → — → —"
    console = Console(file=io.StringIO(), width=500)
    show([first, other], "", console)
    assert {column, "yes"} <= {*re.split(r"\s{2,}", console.file.getvalue())}
    assert sentence in console.file.getvalue().splitlines()


def test_a_checkpointed_model_without_gradients_is_not_exact():
    lacking = record(250) | {"digests": [{"loss": "a"}] * 2}
    (row,) = rows([three(checkpointed=lacking)])
    assert row.faults == ("resnet50 is not exact: it differs in gradients from step 1 on",)


def test_a_third_variant_that_is_not_there_is_a_fault_and_the_rest_is_shown():
    (row,) = rows([three(optimizer_in_backward=FAILED)])
    assert row.faults == ("resnet50 optimizer in backward failed: killed by SIGKILL",)
    assert (row.exact, row.ratio()) == (None, 0.25)
    (row,) = rows([three(optimizer_in_backward=UNFIT)])
    assert row.faults == ("resnet50 optimizer in backward does not fit: needs more",)
    assert cells(row, VARIANTS)["step peak: + optimizer in backward"] == "does not fit"


def test_rows_of_two_and_of_three_variants_share_a_table(tmp_path):
    found = [three(), comparison()]
    console = Console(file=io.StringIO(), width=260)
    show(rows(found), "Title", console)
    assert "step peak: + optimizer in backward" in console.file.getvalue()
    written = write_report(rows(found), heading(found, "mine", "command"), tmp_path)
    assert [
        entry["peak_bytes_optimizer_in_backward"] for entry in table(written, "models.csv")
    ] == [
        "100000000",
        "",
    ]
    seconds = [entry["seconds_optimizer_in_backward"] for entry in table(written, "timings.csv")]
    assert seconds == ["1.2", "2.6", "4.4", "", "", ""]
    lines = [line for line in written.read_text().splitlines() if line.startswith("| resnet50")]
    assert "95.4 MiB (0.100)" in lines[0]
    assert len({line.count("|") for line in lines}) == 1
    assert page(found, heading(found, "mine", "command"))


def test_results_of_two_variants_have_no_column_of_a_third(tmp_path):
    found = [comparison()]
    console = Console(file=io.StringIO(), width=200)
    show(rows(found), "Title", console)
    written = write_report(rows(found), heading(found, "mine", "command"), tmp_path)
    (table_line,) = re.findall(r"\| model .*", written.read_text())
    texts = (console.file.getvalue(), table_line, written.with_name("models.csv").read_text())
    assert not any(re.search("optimizer.in.backward", text) for text in texts)
    shown, _, _ = page(found, heading(found, "mine", "command")).partition('id="words"')
    assert "+ optimizer in backward" not in shown


def test_quartiles_lie_between_the_values():
    assert quartiles([1.9, 1.0, 1.1, 1.3, 1.2]) == [1.1, 1.3]
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == [2.25, 4.75]


def test_a_difference_is_a_fault_that_names_kind_and_step():
    (row,) = rows([comparison(loss="b")])
    assert row.exact is False
    assert row.faults == ("resnet50 is not exact: it differs in loss from step 2 on",)


def varying(**cell):
    """A comparison whose baseline differs from itself, in other kinds than checkpointed does."""
    second = record(1000) | {"digests": [{"loss": "a", "gradients": "h"}] * 2}
    baseline = record(1000, cell={"device": "cpu", "dtype": "float32", **cell})
    return comparison(loss="b", baseline=baseline, baseline_again=second)


def test_a_baseline_that_differs_from_itself_is_no_fault_of_the_plan():
    (row,) = rows([varying()])
    assert (row.exact, row.baseline_repeats) == (None, False)
    assert row.faults == (
        "resnet50: the baseline does not repeat its own numbers: two trainings of it differ in "
        "gradients from step 1 on, so nothing can be compared bit for bit; --deterministic "
        "makes torch choose deterministic kernels",
    )
    (row,) = rows([varying(deterministic=True)])
    assert "--deterministic" not in row.faults[0]
    assert row.faults[0].endswith("bit for bit; torch's deterministic algorithms were on")


def test_a_baseline_that_repeats_itself_leaves_the_fault_with_the_plan():
    (row,) = rows([comparison(loss="b", baseline_again=record(1000))])
    assert (row.exact, row.baseline_repeats) == (False, True)
    assert row.faults == ("resnet50 is not exact: it differs in loss from step 2 on",)


def test_a_second_baseline_counts_only_where_another_training_differs():
    (row,) = rows([varying() | {"checkpointed": record(250)}])
    assert (row.exact, row.baseline_repeats, row.faults) == (True, None, ())


def test_a_second_baseline_that_failed_decides_nothing():
    (row,) = rows([comparison(loss="b", baseline_again=FAILED)])
    assert (row.exact, row.baseline_repeats) == (False, None)
    assert row.faults[0] == "resnet50 baseline again failed: killed by SIGKILL"
    assert "is not exact" in row.faults[1]


def test_a_baseline_that_varies_is_told_in_each_form_of_a_report(tmp_path):
    found = [varying(), comparison(loss="b", baseline_again=record(1000)), comparison()]
    console = Console(file=io.StringIO(), width=220)
    show(rows(found), "Title", console)
    written = write_report(rows(found), heading(found, "mine", "command"), tmp_path)
    shown = page(found, heading(found, "mine", "command"))
    for text in (console.file.getvalue(), written.read_text(), shown):
        assert text.count("the baseline does not repeat its own numbers") == 1
    verdicts = [line.split("|")[-2].strip() for line in written.read_text().splitlines()[6:11]]
    assert verdicts[-3:] == ["baseline varies", "NO", "yes"]
    assert [
        (entry["exact"], entry["baseline_repeats"]) for entry in table(written, "models.csv")
    ] == [
        ("", "False"),
        ("False", "True"),
        ("True", ""),
    ]
    badges = re.findall(r'<span class="badge \w+">([^<]*)<', shown)
    assert [*dict.fromkeys(badges)] == [
        "≠ baseline varies", "✗ not exact", "✓ exact, bit for bit",
    ]  # fmt: skip


def test_the_setting_says_that_algorithms_are_deterministic():
    settings = [heading([varying(deterministic=on)], "mine", "").setting for on in (True, False)]
    assert [", float32, deterministic algorithms, torch 2" in text for text in settings] == [
        True,
        False,
    ]


def test_saving_less_than_the_floor_is_a_fault():
    assert rows([comparison(300)])[0].faults == ()
    (fault,) = rows([comparison(301)])[0].faults
    assert fault == ("resnet50 takes 0.301 of the baseline's step peak; largest_ratio is 0.3")


def test_the_floor_is_about_the_whole_step_whatever_a_part_of_it_takes():
    workspaces = {"baseline": record(1000), "checkpointed": record(301, tensors=100)}
    (row,) = rows([comparison(**workspaces)])
    assert (row.ratio(peak="activation_peak"), row.ratio(peak="tensor_activation_peak")) == (
        0.301,
        0.1,
    )
    assert "takes 0.301" in row.faults[0]
    assert cells(row)["activation peak"] == "1000 B → 301 B (0.301)"
    assert cells(row)["without workspaces"] == "1000 B → 100 B (0.100)"
    (row,) = rows([comparison(checkpointed=record(300, tensors=900))])
    assert row.faults == ()


def test_results_from_before_tensors_were_counted_are_shown_without():
    older = {kind: record(peak) for kind, peak in (("baseline", 1000), ("checkpointed", 300))}
    for found in older.values():
        found["memory"] = {key: found["memory"][key] for key in ("peak", "activation_peak")}
    (row,) = rows([comparison(**older)])
    assert (row.ratio(peak="activation_peak"), row.ratio(peak="tensor_activation_peak")) == (
        0.3,
        None,
    )
    assert row.faults == ()
    assert cells(row)["activation peak"] == "1000 B → 300 B (0.300)"
    assert cells(row)["without workspaces"] == "— → —"


def test_an_optimizer_other_than_the_usual_one_is_named():
    labels = [
        rows([comparison() | {"model": MODEL | {"optimizer": name}}])[0].label
        for name in ("sgd", "adamw")
    ]
    assert labels == ["resnet50", "resnet50 (optimizer=adamw)"]


@pytest.mark.parametrize("kind", ["baseline", "checkpointed", "timing"])
def test_a_failed_cell_is_a_fault_and_the_rest_is_shown(kind):
    (row,) = rows([comparison(**{kind: {"status": "failed", "reason": "killed by SIGKILL"}})])
    assert row.faults == (f"resnet50 {kind} failed: killed by SIGKILL",)
    assert (row.time_ratios("checkpointed") == []) == (kind == "timing")
    assert row.parameters == 25_557_032


def test_the_table_says_what_the_rows_say():
    console = Console(file=io.StringIO(), width=220)
    show(rows([comparison(loss="b")]), "Title", console)
    shown = console.file.getvalue()
    for text in ("25.56 M", "1000 B → 250 B (0.250)", "×1.30 n=3", "NO", "from step 2"):
        assert text in shown
    assert "judged by largest_ratio" in shown


def test_a_baseline_that_does_not_fit_is_a_result_and_no_fault():
    unfit = {"status": "does not fit", "reason": "needs more"}
    (row,) = rows([comparison(baseline=unfit, timing=unfit)])
    assert (row.faults, row.ratio(peak="activation_peak"), row.exact) == ((), None, None)
    assert cells(row)["step peak: baseline"] == "does not fit"
    assert cells(row)["activation peak"] == "does not fit → 250 B"
    (row,) = rows([comparison(checkpointed=unfit)])
    assert row.faults == ("resnet50 checkpointed does not fit: needs more",)


def test_rows_tell_models_apart_by_their_arguments():
    arguments = {"image_size": 224, "classes": 10}
    model = MODEL | {"arguments": arguments, "checkpoint": "sqrt"}
    (row,) = rows([comparison() | {"model": model}])
    assert cells(row)["model"] == "resnet50 (checkpoint=sqrt, classes=10)"
    assert rows([comparison()])[0].label == "resnet50"


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([1.5], "×1.50 n=1"),
        ([1.0, 1.1, 1.2, 1.9], "×1.15 n=4"),
        ([1.0, 1.1, 1.2, 1.3, 1.9], "×1.20 [1.10, 1.30] n=5"),
    ],
)
def test_quartiles_are_those_of_at_least_five_pairs_and_their_number_is_said(ratios, said):
    seconds = {"baseline": [1.0] * len(ratios), "checkpointed": ratios}
    found = [comparison(timing={"status": "done", "step_seconds": seconds})]
    assert cells(rows(found)[0])["step time: checkpointed"] == said
    console = Console(file=io.StringIO(), width=220)
    show(rows(found), "Title", console)
    assert said in console.file.getvalue()
    text = re.sub(r"<[^>]+>", "", page(found, heading(found, "mine", "command")))
    (time,) = set(re.findall(r"×\d[^×—]*?n=\d", text))
    assert " ".join(time.split()) == said


def test_a_cell_without_a_number_is_in_the_picture(tmp_path):
    failed = {"status": "failed", "reason": "killed"}
    unfit = {"status": "does not fit", "reason": "needs more"}
    found = [comparison(checkpointed=failed), comparison(baseline=unfit)]
    page = write_report(rows(found), heading(found, "mine", "python x"), tmp_path)
    picture = page.with_name("comparison.svg").read_text()
    assert "<!-- failed -->" in picture
    assert "<!-- does not fit -->" in picture


def test_a_table_too_wide_for_all_that_may_be_left_out_cuts_nothing():
    console = Console(file=io.StringIO(), width=60)
    long = MODEL | {"arguments": {"activation": "prelu", "vocabulary": 33278}}
    seconds = {kind: [1.0] * 5 for kind in VARIANTS}
    show(rows([three(timing={"step_seconds": seconds} | DONE) | {"model": long}]), "Title", console)
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= 60
    assert "…" not in shown
    for text in ("33278", "954 MiB", "(0.250)", "95.4 MiB", "×1.00"):
        assert text in shown


@pytest.mark.parametrize("width", [70, 80, 90, 100, 110, 120, 140])
@pytest.mark.parametrize("made", [comparison, three])
def test_the_table_fits_the_terminal_and_cuts_no_number(width, made):
    console = Console(file=io.StringIO(), width=width)
    seconds = {"baseline": [1.0] * 5, "checkpointed": [1.0, 1.1, 1.1, 1.2, 1.9]}
    if made is three:
        seconds["optimizer_in_backward"] = [1.3] * 5
    show(rows([made(timing={"step_seconds": seconds} | DONE)]), "Title", console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in console.file.getvalue()
    numbers = {"954 MiB", "(0.250)", "×1.10", "[1.10, 1.20]", "n=5"}
    # a terminal too narrow for all of three shows their whole step
    activations = {"1000 B", "250 B", "0.250"} if made is comparison or width >= 100 else set()
    third = {"95.4 MiB", "(0.100)"} if made is three else set()
    third |= {"×1.30"} if made is three and width >= 90 else set()
    for number in numbers | activations | third:
        assert number in console.file.getvalue()


def test_the_files_hold_the_same_numbers(tmp_path):
    found = rows([comparison()])
    above = heading([comparison()], "mine", "python test_memory_optimized.py mine.yaml")
    page = write_report(found, above, tmp_path / "mine")
    (model,) = table(page, "models.csv")
    assert int(model["activation_peak_bytes_baseline"]) == 1000
    assert float(model["activation_peak_ratio"]) == 0.25
    assert float(model["tensor_activation_peak_ratio"]) == 0.25
    assert int(model["tensor_peak_bytes_checkpointed"]) == 10**8 + 250
    assert (model["time_pairs"], model["time_ratio_lower_quartile"]) == ("3", "")
    timings = table(page, "timings.csv")
    assert [float(entry["seconds_baseline"]) for entry in timings] == SECONDS["baseline"]
    text = page.read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("| resnet50"))
    assert [cell.strip() for cell in line.split("|")[1:4]] == ["resnet50", "4×224×224", "25.56 M"]
    assert "A processor, 2 threads, float32" in text
    assert "`python test_memory_optimized.py mine.yaml`" in text


def test_the_picture_is_drawn_and_the_same_each_time(tmp_path):
    found, above = rows([comparison()]), heading([comparison()], "mine", "command")
    pages = [write_report(found, above, tmp_path / name) for name in ("one", "other")]
    first, second = (page.with_name("comparison.svg").read_bytes() for page in pages)
    assert first == second
    assert pages[0].with_name("comparison.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_a_gpus_results_has_reserved_bytes_and_replays(tmp_path):
    found = [on_gpu(recorded.comparison())]
    write_report(rows(found), heading(found, "mine", "command"), tmp_path)
    text = (tmp_path / "comparison.svg").read_text()
    for words in ("13.0 MiB, 15.0 MiB reserved", "frame: reserved", "ring: a replay", "×0.50"):
        assert f"<!-- {words}" in text


def test_a_report_without_a_number_is_still_written(tmp_path):
    failed = {"status": "failed", "reason": "out of memory"}
    broken = [comparison(baseline=failed, checkpointed=failed, timing=failed)]
    page = write_report(rows(broken), heading(broken, "mine", "command"), tmp_path)
    assert "out of memory" in page.read_text()
    assert "nothing could be measured" in page.read_text()
