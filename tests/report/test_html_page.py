"""The page shows what was recorded, each number as it stands in the results, and needs no other."""

import base64
import csv
import gzip
import io
import json
import re
import statistics
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

import pytest

from tests.report.recorded import MIB, PLACE, comparison, older, plain
from zoo.report.bokeh_charts import interactive
from zoo.report.charts import CATEGORIES, categories_chart
from zoo.report.html_page import page
from zoo.report.rows import Heading, rows
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


def packed(text: str, name: str) -> str:
    (found,) = re.findall(rf'id="{name}">([^<]*)<', text)
    return gzip.decompress(base64.b64decode(found)).decode()


def files(text: str) -> dict[str, str]:
    found = {}
    for attributes, _ in Elements(text).all("a"):
        if name := attributes.get("download"):
            head, _, body = (attributes["href"] or "").partition(",")
            found[name] = base64.b64decode(body).decode() if "base64" in head else unquote(body)
    return found


def columns(picture: Any) -> list[dict[str, list[Any]]]:
    """The columns of every data source of a picture."""
    if isinstance(picture, dict):
        own = [dict(picture["entries"])] if picture.get("type") == "map" else []
        return own + [found for part in picture.values() for found in columns(part)]
    return (
        [found for part in picture for found in columns(part)] if isinstance(picture, list) else []
    )


@pytest.fixture(scope="module")
def text() -> str:
    return page([comparison(), comparison(name="vnet")], HEADING)


def test_every_size_is_the_one_in_the_results_of_the_page(text: str) -> None:
    results = json.loads(files(text)["mine.json"])["comparisons"]
    sizes = [found for found in Elements(text).all("data") if "data-from" in found[0]]
    assert len(sizes) == 2 * 38
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
    assert f"−46.2 % {whole} + optimizer in backward" in three
    assert "baseline 13.0 MiB checkpointed 8.00 MiB (0.615)" in three
    assert "+ optimizer in backward 7.00 MiB (0.538)" in three
    for card in (two, without):
        assert f"−38.5 % {whole} baseline 13.0 MiB checkpointed 8.00 MiB (0.615) time" in card
    assert "peak of the whole" not in small
    assert "Step peak does not fit" in re.sub("<[^>]+>", "", text)


def test_a_page_of_older_results_shows_their_two_variants() -> None:
    text = page([older(comparison())], HEADING)
    pictures = json.loads(packed(text, "pictures"))
    assert [name for name in pictures if name.startswith("model-0")] == [
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
    assert [place["id"] for place in places] == list(json.loads(packed(text, "pictures")))
    assert len(places) == 2 * 7
    assert all(place["aria-label"] and place["role"] == "img" for place in places)
    figures = text.split('<div class="figure"')[1:]
    assert all("<table" in figure for figure in figures)


def test_pictures_show_the_recorded_numbers(text: str) -> None:
    pictures = json.loads(packed(text, "pictures"))
    recorded = comparison()["checkpointed"]["timeline"]["bytes"]
    areas = [c for c in columns(pictures["model-0-checkpointed"]) if "low" in c]
    assert len(areas) == len(recorded)
    for area, sizes in zip(areas, recorded.values(), strict=True):
        drawn = [top - low for low, top in zip(area["low"], area["y"], strict=True)]
        assert drawn[:-1] == pytest.approx([size / MIB for size in sizes], abs=1e-4)
    (total,) = (c for c in columns(pictures["model-0-checkpointed"]) if "tip 0" in c)
    for number, sizes in enumerate(reversed(recorded.values())):
        assert total[f"tip {number}"][:-1] == [*map(format_bytes, sizes)]
    curves = [c["y"] for c in columns(pictures["model-0-memory"]) if "low" in c]
    assert [max(curve) for curve in curves] == [13.0, 8.0, 7.0]
    spots = [c["x"] for c in columns(pictures["model-0-frontier"]) if "tip 0" in c]
    assert spots == [[6.0, 8.0, 13.0], [13.0], [6.0], [9.0], [8.0], [13.0], [8.0]]


def test_tips_and_the_table_name_step_module_and_line(text: str) -> None:
    pictures = json.loads(packed(text, "pictures"))
    for name in ("baseline", "checkpointed", "optimizer_in_backward"):
        told = [c for c in columns(pictures[f"model-0-{name}"]) if "tip 0" in c]
        for column in told:
            *_, step, module, line = (column[key] for key in sorted(column) if "tip" in key)
            assert [step[0], module[0], line[0]] == ["—"] * 3
            assert {*zip(step[1:], module[1:], line[1:], strict=True)} == {tuple(PLACE)}
    bars = [c for c in columns(pictures["model-0-plan"]) if "tip 3" in c]
    assert [c["tip 3"] for c in bars] == [
        ["—", "zoo/models/resnet.py:52", "—"],
        ["zoo/models/resnet.py:47", "zoo/models/resnet.py:52"] * 2 + ["zoo/models/resnet.py:47"],
    ]
    assert text.count('<td class="faint break">zoo/models/resnet.py:47</td>') == 2 * 3
    older = comparison()
    del older["baseline"]["chain"]["lines"]
    for kind in ("baseline", "checkpointed", "optimizer_in_backward"):
        del older[kind]["timeline"]["places"]
    told = columns(json.loads(packed(page([older], HEADING), "pictures")))
    assert not any("tip 4" in c for c in told)


def test_a_long_chain_is_told_by_blocks() -> None:
    found, count = comparison(), 150
    names = [f"layer1.{block}.{part}" for block in range(count) for part in ("a", "b", "c")]
    blocks = [block for block in range(count) for _ in range(3)]
    found["baseline"]["chain"] = {"names": names, "blocks": blocks, "saved": [MIB] * 3 * count}
    found["checkpointed"]["plan"] = f"(0-2) 3-{3 * count - 1}"
    text = page([found], HEADING)
    assert text.count('<td class="number">2</td>') == 1
    assert ">layer1.149.a to layer1.149.c</th>" in text
    assert text.count('<data value="3145728">3.00 MiB</data></td><td class="number">1</td>') == 149


def test_categories_are_stacked_in_one_order_whatever_that_of_the_file() -> None:
    drawn = comparison()["baseline"]["timeline"]
    drawn["bytes"] = {name: [1] * 12 for name in sorted(CATEGORIES)}
    picture = json.dumps(interactive(categories_chart(drawn, 12 * MIB)))
    names = [name for name in re.findall(r'"name": "([^"]+)"', picture) if name in CATEGORIES]
    assert names == list(CATEGORIES)


def test_the_plan_is_drawn_as_it_nests(text: str) -> None:
    found = columns(json.loads(packed(text, "pictures"))["model-0-plan"])
    kept, recomputed, outer, inner = ([*map(str, c["tip 0"])] for c in found if "left" in c)
    assert (len(kept), len(recomputed)) == (3, 5)
    assert recomputed[0] == "layer1.0.convolve"
    assert (outer, inner) == (["1 to 5"], ["4 to 5"])


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
    roles = re.findall(r'"\w+_color","([a-z-]+)"', packed(text, "pictures"))
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
    assert text.count("✗ not exact") == 2
    everything = {"baseline": FAILED, "checkpointed": FAILED, "timing": FAILED}
    assert "killed by SIGKILL" in page([comparison(**everything)], HEADING)


def test_names_are_text_and_no_markup() -> None:
    heading = Heading("<b>", "</style><script>alert(1)</script>", "python '<i>'")
    text = page([comparison(name="</script><u>")], heading)
    for markup in ("<b>", "<i>", "<u>", "alert(1)</script>"):
        assert markup not in text


def test_the_same_results_make_the_same_page() -> None:
    assert page([comparison()], HEADING) == page([comparison()], HEADING)
