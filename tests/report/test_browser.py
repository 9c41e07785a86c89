"""Pages in a real browser: headless Chromium, driven by playwright, with every address but files refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.suites import TASKS, write_suite

from tape_pe.report import write_report, write_site

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
WIDE, PHONE = {"width": 1200, "height": 900}, {"width": 390, "height": 844}
RANGES = "Out of range: longer or harder than trained"

# WCAG's ratio of luminances, the smallest of all texts, colours as the browser mixes them.
LEAST_CONTRAST = """
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const paint = (colours) => {
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255);
  };
  const linear = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (element) =>
    element ? [...behind(element.parentElement), getComputedStyle(element).backgroundColor] : ["white"];
  const ratios = [...document.querySelectorAll("p, li, a, th, td, .note, .badge, h1, h2, caption")].map((element) => {
    const back = behind(element);
    const both = [back, [...back, getComputedStyle(element).color]].map((colours) => luminance(paint(colours)) + 0.05);
    return Math.max(...both) / Math.min(...both);
  });
  return Math.min(...ratios);
}"""
SMALL_TEXTS = """
() => [...document.querySelectorAll("td, th, p, li, .note, .badge")]
  .filter((element) => parseFloat(getComputedStyle(element).fontSize) < 11).length
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no browser in PATH, none of {', '.join(NAMES)}"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with all tasks, many encodings, a run that failed and long labels."""
    labels = ["rope", "nope", "alibi", "fire", "an_encoding_with_a_name_of_many_letters_without_a_break", "tape"]
    folder = write_suite(
        tmp_path_factory.mktemp("suites") / "a_suite_with_quite_a_long_name_that_has_no_spaces_in_it",
        encodings={label: {} for label in labels},
        failed={"s3/tape/seed-1": "RuntimeError: " + "a_long_message" * 20},
    )
    return write_site(folder).parent


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file; at the end, nothing may have been logged, have failed or have been asked from elsewhere."""
    contexts, complaints = [], []

    def request(one: Any) -> None:
        if not one.url.startswith(("file://", "data:")):
            complaints.append(f"asked for {one.url}")

    def open_file(path: Path, viewport: dict[str, int] = WIDE, **options: Any) -> Any:
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("requestfailed", lambda failed: complaints.append(f"failed: {failed.url}"))
        page.on("request", request)
        page.goto(path.as_uri())
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert not complaints


def table(page: Any, caption: str) -> Any:
    return page.locator("table", has=page.locator("caption", has_text=caption)).first


def column(page: Any, caption: str, number: int) -> list[str]:
    """The first lines of a column's cells."""
    cells = table(page, caption).locator(f"tbody tr > :nth-child({number})").all_inner_texts()
    return [cell.splitlines()[0].strip() for cell in cells]


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_every_page_fits_its_window_and_shows_its_pictures(site, visit, viewport):
    pages = sorted(site.glob("*.html"))
    assert len(pages) == 1 + len(TASKS)
    for path in pages:
        page = visit(path, viewport)
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], path.name
        broken = "[...document.images].filter(image => !image.complete || !image.naturalWidth || !image.alt).length"
        assert page.evaluate(broken) == 0, path.name
        assert page.evaluate(SMALL_TEXTS) == 0, f"{path.name} can be read without magnifying"
        page.close()


def test_every_link_leads_to_a_file(site, visit):
    for path in sorted(site.glob("*.html")):
        page = visit(path)
        addresses = page.evaluate("[...document.links].map(link => link.href)")
        assert len(addresses) > len(TASKS)
        for address in addresses:
            assert address.startswith("file://")
            assert page.evaluate("address => decodeURIComponent(new URL(address).pathname)", address)
            target = Path(page.evaluate("address => decodeURIComponent(new URL(address).pathname)", address))
            assert target.is_file()
            assert target.is_relative_to(site)
        page.close()


def test_navigation_by_keyboard(site, visit):
    page = visit(site / "index.html")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "addition"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "focus can be seen"
    page.keyboard.press("Enter")
    page.wait_for_url("**/addition.html")
    assert page.locator("h1").inner_text() == "addition"
    assert page.locator("nav a[aria-current=page]").inner_text() == "addition"


@pytest.mark.parametrize("press", ["click", "Enter", "Space"])
def test_tables_are_sorted_by_mouse_and_keyboard(site, visit, press):
    page = visit(site / "index.html")
    head = table(page, RANGES).locator("thead th").nth(2)
    assert head.get_attribute("aria-sort") == "none"
    button = head.get_by_role("button")

    def use() -> None:
        if press == "click":
            button.click()
        else:
            button.focus()
            page.keyboard.press(press)

    use()
    assert head.get_attribute("aria-sort") == "descending"
    values = [float(text.split()[0]) for text in column(page, RANGES, 3)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == 6
    use()
    assert head.get_attribute("aria-sort") == "ascending"
    assert [float(text.split()[0]) for text in column(page, RANGES, 3)] == sorted(values)
    name = table(page, RANGES).locator("thead th").first
    name.get_by_role("button").click()
    assert (name.get_attribute("aria-sort"), head.get_attribute("aria-sort")) == ("ascending", "none")
    assert column(page, RANGES, 1)[0] == "alibi"


def test_missing_scores_sort_last(tmp_path, visit):
    folder = write_suite(tmp_path / "gap", tasks={"s3": TASKS["s3"]}, seeds=[0], missing=["s3/nope/seed-0"])
    page = visit(write_site(folder))
    button = table(page, RANGES).locator("thead th").nth(1).get_by_role("button")
    for _ in range(2):
        button.click()
        assert column(page, RANGES, 1)[-1] == "nope"


def test_tables_scroll_by_keyboard_on_a_phone(site, visit):
    page = visit(site / "index.html", PHONE)
    region = page.locator(".scroll").first
    region.focus()
    page.keyboard.press("ArrowRight")
    playwright.expect(region).not_to_have_js_property("scrollLeft", 0)  # waits without `eval`, which the page forbids
    first = table(page, RANGES).locator("tbody th").first
    assert first.bounding_box()["x"] < 40, "the encoding's name stays in sight"


def test_numbers_of_a_picture_open_by_keyboard(site, visit):
    page = visit(site / "s3.html")
    summary = page.locator("figure details summary").first
    numbers = page.locator("figure details table").first
    assert not numbers.is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    assert numbers.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(site, visit, scheme):
    page = visit(site / "index.html", color_scheme=scheme)
    assert page.evaluate(LEAST_CONTRAST) >= 4.5, "WCAG AA"


def test_without_scripts_everything_is_there(site, visit):
    page = visit(site / "s3.html", java_script_enabled=False)
    assert page.locator("table").count() > 5
    assert page.locator("thead button").count() == 0


def test_report_of_single_runs(make_run, tmp_path, visit):
    runs = [make_run("a"), make_run("b", encoding="rope", metrics={"exact_match": 0.5})]
    page = visit(write_report(runs, tmp_path / "report.html"), PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    table(page, "Runs").locator("thead th").last.get_by_role("button").press("Enter")
    assert column(page, "Runs", 1) == ["b", "a"]
