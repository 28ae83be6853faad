"""What a browser makes of the page, where Chromium and playwright are installed."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.recorded import comparison
from zoo.report import html_page as report_page
from zoo.report.rows import Heading
from zoo.report.two_runs import two_runs

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heading = Heading("mine", "A processor, 2 threads", "python test_memory_optimized.py mine.yaml")
    found = [comparison(), comparison(name="vnet")]
    text = report_page.page(found, heading, two_runs(found, found[:1], "earlier.jsonl"))
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # as root, as in a container, Chromium runs only without its sandbox
        arguments = ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


@pytest.fixture
def look(browser: Any, path: Path) -> Iterator[Any]:
    """Opens the page at a size and in a color scheme; what it says or asks for fails the test."""
    said: list[str] = []
    contexts = []

    def look(size: str = "desktop", scheme: str = "light", **options: Any) -> Any:
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme,
            has_touch=size == "phone", is_mobile=size == "phone", **options,
        )  # fmt: skip
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url))
        page.goto(path.as_uri())
        return page

    yield look
    for context in contexts:
        context.close()
    assert [text for text in said if not text.startswith(("file:", "data:", "blob:"))] == []
    assert sum(text.startswith("file:") for text in said) == len(contexts)


def canvas(page: Any, place: str) -> bytes:
    shot: bytes = page.locator(f"#{place}").screenshot()
    return shot


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_picture_is_drawn_and_nothing_is_wider_than_the_screen(
    look: Any, size: str, scheme: str
) -> None:
    page = look(size, scheme)
    places = page.locator(".picture:visible")
    assert places.count() == 6
    for place in places.all():
        box = place.locator(":scope > svg").bounding_box()
        assert box["height"] > 200
        assert box["width"] > 200
        # as large as on any other screen
        height = "text => [getComputedStyle(text).fontSize, text.getScreenCTM().d]"
        assert place.locator("text").first.evaluate(height) == ["12px", 1]
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]


def test_pictures_follow_the_color_scheme(look: Any) -> None:
    page = look()
    light = canvas(page, "model-0-baseline")
    page.emulate_media(color_scheme="dark")
    dark = canvas(page, "model-0-baseline")
    page.emulate_media(color_scheme="light")
    assert canvas(page, "model-0-baseline") == light != dark


def test_the_curve_of_activations_takes_the_place_of_the_whole(look: Any) -> None:
    page = look()
    page.get_by_label("activations only").first.check(force=True)
    assert not page.locator("#model-0-memory").is_visible()
    assert page.locator("#model-0-activations").bounding_box()["width"] > 600


def test_the_pointer_is_told_what_is_below_it(look: Any) -> None:
    page = look()
    place = page.locator("#model-0-checkpointed > svg")
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    middle = [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]
    below = (
        "([x, y]) => document.elementFromPoint(x, y).querySelector(':scope > title').textContent"
    )
    assert "parameters: 3.00 MiB\n" in page.evaluate(below, middle)


def test_a_finger_is_told_what_it_taps(look: Any) -> None:
    page = look("phone")
    page.locator("#model-0-checkpointed > svg").tap()
    shown = page.locator(".told")
    assert "parameters: 3.00 MiB\n" in shown.inner_text()
    assert "zoo/models/resnet.py:47" in shown.inner_text()
    box = shown.bounding_box()
    assert 0 <= box["x"] < box["x"] + box["width"] <= SIZES["phone"][0]
    page.locator("#model-0-h2").tap()
    assert not shown.count()


def test_one_model_is_shown_at_a_time(look: Any) -> None:
    page = look()
    models = page.get_by_role("navigation", name="Models")
    assert [part.is_visible() for part in page.locator("main > section").all()] == [True, False]
    models.get_by_role("link", name="vnet").click()
    assert [part.is_visible() for part in page.locator("main > section").all()] == [False, True]
    assert models.locator("[aria-current=true]").inner_text() == "vnet"
    assert page.locator("#model-1-memory").is_visible()
    page.get_by_role("link", name="What the words mean").click()
    assert page.locator("#model-1-memory").is_visible(), "no other model was asked for"


def test_a_table_on_a_phone_shows_its_numbers_below_their_names(look: Any) -> None:
    page = look("phone")
    table = page.get_by_role("region", name="All models")
    assert table.evaluate("table => table.scrollWidth <= table.clientWidth")
    label = "cell => getComputedStyle(cell, '::before').content"
    labels = [cell.evaluate(label) for cell in table.locator("tr:last-child td").all()]
    assert (labels[0], labels[-1]) == ('"step peak"', '"step time"')


def test_a_download_is_the_file(look: Any) -> None:
    page = look()
    with page.expect_download() as started:
        page.get_by_role("link", name="models.csv").click()
    text = Path(started.value.path()).read_text(encoding="utf-8")
    assert text.splitlines()[1].startswith("resnet50,,true,4×224×224,25557032")


def test_prints_show_pictures_of_the_day(look: Any) -> None:
    page = look("desktop", "dark")
    grid = page.locator("#model-0-memory .grid").last
    color = "line => getComputedStyle(line).stroke"
    night = grid.evaluate(color)
    page.emulate_media(media="print")
    assert grid.evaluate(color) == look().locator(".grid").last.evaluate(color) != night
    assert not page.locator(".choice").first.is_visible()


def test_pictures_and_tables_need_no_script(look: Any, browser: Any, path: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator(".picture:visible").count() == 2 * 6
    page.get_by_text("Table: categories at the peak").first.click()
    assert page.get_by_role("region", name="Categories at the peak, resnet50").is_visible()
    context.close()
