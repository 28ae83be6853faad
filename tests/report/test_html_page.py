"""The page shows what was recorded, each number as it stands in the results, and needs no other."""

import base64
import csv
import io
import json
import re
import statistics
from html.parser import HTMLParser
from itertools import pairwise
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from tests.report.recorded import MIB, PLACE, comparison, older, on_gpu, plain, with_graphs
from zoo.report.charts import CATEGORIES, categories_chart
from zoo.report.html_page import page
from zoo.report.rows import Heading, rows
from zoo.report.svg_charts import HEIGHT, svg
from zoo.report.text_report import csv_files
from zoo.units import format_bytes

HEADING = Heading("mine", "A processor, 2 threads", "python test_memory_optimized.py mine.yaml")
FAILED = {"status": "failed", "reason": "killed by SIGKILL"}


class Elements(HTMLParser):
    """Every element with its attributes and the text right inside of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[tuple[str, list[str]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        if tag not in ("meta", "input"):
            self.open.append((tag, self.found[-1][2]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.open[-1][1].append(data)

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        """The attributes and text of all elements of a tag."""
        return [(attributes, "".join(text)) for name, attributes, text in self.found if name == tag]


def pictures(text: str) -> dict[str, ElementTree.Element]:
    """The SVG of each picture by the name of its place."""
    place = r'<div class="picture" id="([^"]+)"[^>]*>(<svg.*?</svg>)<div'
    found = re.findall(place, text, re.DOTALL)
    return {name: ElementTree.fromstring(shapes) for name, shapes in found}


def told(picture: ElementTree.Element) -> list[dict[str, str]]:
    """The lines of each tip of a picture, by what they name."""
    texts = [title.text or "" for title in picture.iter("title")]
    return [dict(line.split(": ", 1) for line in text.splitlines()) for text in texts]


def files(text: str) -> dict[str, str]:
    found = {}
    for attributes, _ in Elements(text).all("a"):
        if name := attributes.get("download"):
            head, _, body = (attributes["href"] or "").partition(",")
            found[name] = base64.b64decode(body).decode() if "base64" in head else unquote(body)
    return found


@pytest.fixture(scope="module")
def text() -> str:
    return page([comparison(), comparison(name="vnet")], HEADING)


def test_every_size_is_the_one_in_the_results_of_the_page(text: str) -> None:
    results = json.loads(files(text)["mine.json"])["comparisons"]
    sizes = [found for found in Elements(text).all("data") if "data-from" in found[0]]
    assert len(sizes) == 2 * 35
    for attributes, shown in sizes:
        value = results
        for part in str(attributes["data-from"]).split("/"):
            value = value[int(part)] if isinstance(value, list) else value[part]
        assert int(str(attributes["value"])) == value
        assert shown == format_bytes(value)


def test_what_follows_from_the_results_is_computed_right(text: str) -> None:
    (row, _) = rows([comparison(), comparison(name="vnet")])
    derived = [found for found in Elements(text).all("data") if "data-from" not in found[0]]
    shown = {written: float(str(attributes["value"])) for attributes, written in derived}
    names = ("peak", "activation_peak", "tensor_activation_peak")
    ratios = [row.ratio(peak=name) for name in names]
    whole = row.ratio("optimizer_in_backward")
    for ratio in (whole, *ratios):
        assert ratio is not None
        assert shown[f"{ratio:.3f}"] in (whole, *ratios)
    assert whole is not None
    assert shown[f"−{100 * (1 - whole):.1f} %"] == 1 - whole
    for kind, median in (("checkpointed", 1.3), ("optimizer_in_backward", 1.25)):
        assert shown[f"×{median:.2f}"] == statistics.median(row.time_ratios(kind)) == median
    assert shown["25.56 M"] == 25_557_032


def cards(text: str) -> list[str]:
    found = re.findall(r'<li class="card">(.*?)</li>', text, re.DOTALL)
    return [" ".join(re.sub("<[^>]+>", "", card).split()) for card in found]


def test_a_card_headlines_the_whole_step_of_the_last_variant() -> None:
    """13 MiB, 8 MiB and 7 MiB with the parameters; 10 MiB, 5 MiB and 4 MiB of activations."""
    failed = comparison(optimizer_in_backward=FAILED)
    unfit = comparison(baseline={"status": "does not fit", "reason": "needs more"})
    text = page([comparison(), older(comparison()), failed, unfit], HEADING)
    three, two, without, small = cards(text)
    whole = "peak of the whole training step, checkpointed"
    assert f"−46.2 % {whole} + optimizer in backward, against the baseline" in three
    assert "baseline 13.0 MiB checkpointed 8.00 MiB (0.615)" in three
    assert "+ optimizer in backward 7.00 MiB (0.538)" in three
    for card in (two, without):
        assert f"−38.5 % {whole}, against the baseline baseline 13.0 MiB" in card
        assert "checkpointed 8.00 MiB (0.615) time" in card
    assert "peak of the whole" not in small
    assert "Step peak: baseline does not fit" in re.sub("<[^>]+>", "", text)


def test_a_page_of_older_results_shows_their_two_variants() -> None:
    text = page([older(comparison())], HEADING)
    assert [*pictures(text)] == [
        *("model-0-memory", "model-0-activations", "model-0-baseline", "model-0-checkpointed"),
        *("model-0-plan", "model-0-frontier"),
    ]
    shown, _, _ = text.partition('id="words"')
    assert "optimizer in backward" not in shown


def test_the_results_and_tables_are_in_the_page(text: str) -> None:
    found, made = files(text), [comparison(), comparison(name="vnet")]
    assert json.loads(found["mine.json"])["comparisons"] == made
    assert found["models.csv"] == csv_files(rows(made), None)["models.csv"]
    memory = list(csv.DictReader(io.StringIO(found["memory.csv"])))
    baseline = made[0]["baseline"]["timeline"]
    shown = [int(row["saved activations"]) for row in memory[:12]]
    assert shown == baseline["bytes"]["saved activations"]
    assert {row["recomputed"] for row in memory} == {"0"}
    assert len(found["timings.csv"].splitlines()) == 1 + 2 * 3
    traces = json.loads(found["memory.perfetto.json"])["traceEvents"]
    of_baseline = [e for e in traces if e["ph"] == "C" and (e["pid"], e["name"]) == (0, "baseline")]
    assert [e["args"]["saved activations"] for e in of_baseline] == shown
    assert [e["args"]["name"] for e in traces if e["ph"] == "M"] == ["resnet50", "vnet"]


def test_each_place_has_a_picture_and_each_picture_a_place_a_name_and_a_table(text: str) -> None:
    elements = Elements(text)
    places = [a for a, _ in elements.all("div") if a.get("class") == "picture"]
    assert [place["id"] for place in places] == list(pictures(text))
    assert len(places) == 2 * 7
    assert all(place["aria-label"] and place["role"] == "img" for place in places)
    figures = text.split('<div class="figure"')[1:]
    assert all("<table" in figure for figure in figures)


def test_pictures_show_the_recorded_numbers(text: str) -> None:
    drawn, timeline = pictures(text), comparison()["checkpointed"]["timeline"]
    tips = told(drawn["model-0-checkpointed"])
    assert len({tip["event"] for tip in tips}) > 3
    for tip in tips:
        event = int(tip["event"])
        place = min(timeline["points"].index(event) if event in timeline["points"] else 11, 11)
        sizes = {name: column[place] for name, column in timeline["bytes"].items()}
        shown = {name: size for name, size in tip.items() if name in CATEGORIES}
        assert shown == {name: format_bytes(size) for name, size in sizes.items() if size}
    # of each run, from the lower edge
    curves = [path for path in drawn["model-0-memory"].iter("path") if path.get("fill") == "none"]
    downs = [[*map(float, re.findall(r"[V ]([\d.]+)", curve.attrib["d"]))] for curve in curves]
    highest = [(HEIGHT - min(down)) * 1.16 * 13 / HEIGHT for down in downs]
    assert highest == pytest.approx([13, 8, 7], abs=0.01)
    plans = [tip["peak"] for tip in told(drawn["model-0-frontier"])]
    peaks = 6, 8, 13, 13, 6, 9, 8, 13, 8
    assert plans == [format_bytes(peak * MIB) for peak in peaks]


def test_tips_and_the_table_name_module_and_line(text: str) -> None:
    drawn = pictures(text)
    for name in ("baseline", "checkpointed", "optimizer_in_backward"):
        named = {(tip["module"], tip["line"]) for tip in told(drawn[f"model-0-{name}"])}
        assert named == {("—", "—"), tuple(PLACE)}
    lines = [tip["line"] for tip in told(drawn["model-0-plan"]) if "line" in tip]
    assert lines == [
        *("—", "zoo/models/resnet.py:52", "—"),
        *["zoo/models/resnet.py:47", "zoo/models/resnet.py:52"] * 2,
        "zoo/models/resnet.py:47",
    ]
    assert text.count('<td class="faint break">zoo/models/resnet.py:47</td>') == 2 * 3
    older = comparison()
    del older["baseline"]["steps"]["lines"]
    for kind in ("baseline", "checkpointed", "optimizer_in_backward"):
        del older[kind]["timeline"]["places"]
    tips = [tip for picture in pictures(page([older], HEADING)).values() for tip in told(picture)]
    assert not any("line" in tip or "module" in tip for tip in tips)


def test_a_long_chain_is_told_by_blocks() -> None:
    found, count = comparison(), 150
    names = [f"layer1.{block}.{part}" for block in range(count) for part in ("a", "b", "c")]
    blocks = [block for block in range(count) for _ in range(3)]
    found["baseline"]["steps"] = {"names": names, "blocks": blocks, "saved": [MIB] * 3 * count}
    found["checkpointed"]["plan"] = f"(0-2) 3-{3 * count - 1}"
    text = page([found], HEADING)
    assert text.count('<td class="number">2</td>') == 1
    assert ">layer1.149.a to layer1.149.c</th>" in text
    assert text.count('<data value="3145728">3.00 MiB</data></td><td class="number">1</td>') == 149


def test_categories_are_stacked_in_one_order_whatever_that_of_the_file() -> None:
    drawn = comparison()["baseline"]["timeline"]
    drawn["bytes"] = {name: [MIB] * 12 for name in sorted(CATEGORIES)}
    areas = re.findall(r'z" fill="var\(--([a-z-]+)\)', svg(categories_chart(drawn, 12 * MIB)))
    assert areas == [name.replace(" ", "-") for name in CATEGORIES]


def test_curves_begin_at_the_same_bytes_or_the_page_says_why(text: str) -> None:
    assert "at the start of" not in text
    found = comparison()
    for kind in ("baseline", "checkpointed"):
        found[kind]["timeline"]["bytes"]["gradients"] = [MIB] * 12
    told = "Gradients of the step before are at the start of: baseline, checkpointed."
    assert told in page([found], HEADING)


def test_the_plan_is_drawn_as_it_nests(text: str) -> None:
    tips = told(pictures(text)["model-0-plan"])
    steps = [(tip["step"], tip["is"]) for tip in tips if "step" in tip]
    assert [state for _, state in steps] == ["kept"] * 3 + ["recomputed"] * 5
    assert steps[3][0] == "layer1.0.convolve"
    segments = [(tip["segment of steps"], tip["depth"]) for tip in tips if "depth" in tip]
    assert segments == [("1 to 5", "1"), ("4 to 5", "2")]
    modules = [tip["modules"] for tip in tips if "depth" in tip]
    assert modules[1] == "layer1.1.add to layer1.2.convolve"
    below = text.split('id="model-0-plan"')[1].partition("</details>")[0]
    for name in ("conv1", "0", "1", "2", "layer1", "classify"):
        assert f"<span>{name}</span>" in below
    for words in ("kept: 3 steps", "recomputed: 5 steps", "segments: recomputed in one go"):
        assert words in text


def test_the_page_asks_for_nothing_outside_of_it(text: str) -> None:
    elements = Elements(text)
    links = [a.get(key) for _, a, _ in elements.found for key in ("src", "href") if a.get(key)]
    assert all(str(link).startswith(("#", "data:")) for link in links)
    assert "url(" not in text
    assert "@import" not in text
    (policy,) = (a["content"] for a, _ in elements.all("meta") if "http-equiv" in a)
    assert str(policy).startswith("default-src 'none'")
    assert len(text.encode()) < 3_000_000


def test_headings_descend_and_names_are_there_once(text: str) -> None:
    elements = Elements(text)
    levels = [int(tag[1]) for tag, _, _ in elements.found if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(lower - upper <= 1 for upper, lower in pairwise(levels))
    names = [a["id"] for _, a, _ in elements.found if "id" in a]
    assert len(set(names)) == len(names)
    targets = {str(a["href"])[1:] for a, _ in elements.all("a") if str(a["href"]).startswith("#")}
    assert targets <= set(names)
    assert all("scope" in a for a, _ in elements.all("th"))


def test_colors_that_pictures_name_are_in_the_style_sheet(text: str) -> None:
    style, _, _ = text.partition("</style>")
    roles = re.findall(
        r"var\(--([a-z-]+)\)", "".join(re.findall("<svg.*?</svg><div", text, re.DOTALL))
    )
    variants = {"baseline", "checkpointed", "optimizer-in-backward"}
    assert variants | {"in-recompute", "saved-activations"} <= set(roles)
    assert all(f"--{role}:" in style for role in roles)


def test_what_was_not_recorded_is_left_out_and_said() -> None:
    assert 'class="figure"' not in page([plain(comparison())], HEADING)
    found = comparison()
    del found["baseline"]["frontier"]
    found["baseline"]["missing"] = {"frontier": "ArgumentError: numpy is missing"}
    text = page([found], HEADING)
    assert "model-0-frontier" not in text
    assert "ArgumentError: numpy is missing" in text


def test_a_plan_that_recomputes_nothing_has_no_recomputation_in_its_picture() -> None:
    found, legend = comparison(), "recomputation</li>"
    told = [" ".join(page([found], HEADING).split())]
    for kind in ("checkpointed", "optimizer_in_backward"):
        found[kind]["timeline"] = found["baseline"]["timeline"]
    told.append(" ".join(page([found], HEADING).split()))
    assert [text.count(legend) - text.count(f"no {legend}") for text in told] == [1, 0]


def test_a_failed_cell_and_a_difference_are_said() -> None:
    text = page([comparison(loss="b"), comparison(name="vnet", checkpointed=FAILED)], HEADING)
    assert "resnet50 is not exact: it differs in loss from step 2 on" in text
    assert "vnet checkpointed failed: killed by SIGKILL" in text
    # on the card, in the table, above the charts
    assert text.count("✗ not exact") == 3
    everything = {"baseline": FAILED, "checkpointed": FAILED, "timing": FAILED}
    assert "killed by SIGKILL" in page([comparison(**everything)], HEADING)


def test_graphs_are_columns_of_the_page_and_refusals_sentences() -> None:
    refused = {"status": "refused", "reason": "it waits for <b>"}
    text = page([with_graphs(comparison(), baseline_graph=refused), comparison()], HEADING)
    columns = [f"as CUDA graphs: {name}" for name in ("step peak", "reserved", "step time")]
    assert re.findall(r"<th [^>]*>(as CUDA[^<]*)</th>", text) == columns
    assert re.findall(r'data-label="(as CUDA[^"]*)"', text) == columns * 2 * 3
    assert "resnet50 baseline as a CUDA graph is refused: it waits for &lt;b&gt;" in text
    assert '<td class="number" data-label="as CUDA graphs: step time">refused</td>' in text


def test_cards_show_reserved_bytes_and_captured_times_and_the_legend_explains_them() -> None:
    text = page([on_gpu(comparison())], HEADING)
    (card,) = cards(text)
    assert "checkpointed 8.00 MiB (0.615) reserved 10.0 MiB (0.667) +" in card
    assert "time ×1.25 n=3 as a CUDA graph ×0.50, baseline as one ×0.50" in card
    legend, _, _ = text.partition('<ul class="cards">')
    told = ("baseline: no", "Thick bar", "thin bar", "(ratio)", "n pairs", "as a CUDA graph")
    assert [words for words in told if words not in legend] == []
    on_cpu, _, _ = page([comparison()], HEADING).partition('<ul class="cards">')
    assert [words for words in told if words not in on_cpu] == ["thin bar", "as a CUDA graph"]


def test_names_are_text_and_no_markup() -> None:
    heading = Heading("<b>", "</style><script>alert(1)</script>", "python '<i>'")
    text = page([comparison(name="</script><u>")], heading)
    for markup in ("<b>", "<i>", "<u>", "alert(1)</script>"):
        assert markup not in text


def test_the_same_results_make_the_same_page() -> None:
    assert page([comparison()], HEADING) == page([comparison()], HEADING)
