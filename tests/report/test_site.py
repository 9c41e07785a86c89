"""The site of a suite as files: parsed back, every number and link checked; `test_browser.py` opens it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.report.suites import TASKS, noisy, write_suite

from tape_pe.files import replace_folder
from tape_pe.report import overview_text, read_suite, write_site
from tape_pe.report.published import CAPTION, published

OUT_OF_RANGE = "Out of range: longer or harder than trained"
IN_RANGE = "In range: as trained"
SMALL = {name: TASKS[name] for name in ("addition", "s3", "text")}


@pytest.fixture
def pages(parse: Callable[[str], Any]) -> Callable[..., dict[str, Any]]:
    """Writes the site of a suite's folder and parses its pages, by file name."""

    def write(folder: Path, **options: Any) -> dict[str, Any]:
        site = write_site(folder, **options).parent
        return {path.name: parse(path.read_text(encoding="utf-8")) for path in sorted(site.glob("*.html"))}

    return write


def links(site: Path, name: str, page: Any) -> list[Path]:
    """The files that a page's links lead to."""
    addresses = [attributes["href"] for attributes in page.attributes("a")]
    assert all(not re.match(r"[a-z]+:|/", address) for address in addresses), "all links are relative"
    return [(site / name).parent / address for address in addresses]


@pytest.mark.parametrize("task", [None, *TASKS])
def test_all_tasks_make_pages_whose_links_resolve(tmp_path, pages, task):
    if task is None:
        folder = write_suite(tmp_path / "all", seeds=(0, 1), encodings={"rope": {}, "tape": {}})
    else:
        folder = write_suite(tmp_path / "one", tasks={task: TASKS[task]}, seeds=(0,), encodings={"tape": {}})
    found = pages(folder)
    assert set(found) == {"index.html", *(f"{label}.html" for label in TASKS if task in (None, label))}
    for name, page in found.items():
        assert all(path.is_file() for path in links(folder / "site", name, page))
        assert all(image["alt"] for image in page.attributes("img"))
        assert len(page.captions) == len(page.tables)
        identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
        assert len(identifiers) == len(set(identifiers))
        named_by = [attributes["aria-labelledby"] for _, attributes in page.tags if "aria-labelledby" in attributes]
        assert set(named_by) <= set(identifiers)
        current = [a["href"] for a in page.attributes("a") if "aria-current" in a]
        assert current == [name]


def test_overview_shows_median_interval_worst_seed_and_the_clearly_best(tmp_path, pages):
    index = pages(write_suite(tmp_path / "steady", tasks=SMALL))["index.html"]
    rows = {row["Encoding"]: row for row in index.table(OUT_OF_RANGE)}
    assert list(rows) == ["rope", "nope", "tape"]
    # By hand for state tracking, of skills 0.2, 0.205 and 0.21.
    values = [sum(1 / (1 + (1 - skill) * k) for k in range(1, 7)) / 6 for skill in (0.2, 0.205, 0.21)]
    half = 4.302653 * (values[2] - values[0]) / 2 / 3**0.5
    mean = sum(values) / 3
    cell = rows["rope"]["s3"]
    assert cell.startswith(f"{100 * values[1]:.1f} %")
    assert f"{100 * (mean - half):.1f} to {100 * (mean + half):.1f} %" in cell
    assert f"worst {100 * values[0]:.1f} %" in cell
    assert "clearly best" not in cell
    assert "clearly best" in rows["tape"]["s3"]
    header = "text: perplexity, longest (less is better)"
    assert "clearly best" in rows["tape"][header], "less perplexity is better"
    assert index.text.count("clearly best: its interval") == 3


def test_nothing_is_called_best_where_intervals_overlap(tmp_path, pages):
    found = pages(write_suite(tmp_path / "noisy", tasks=SMALL, skill=noisy))
    for page in found.values():
        badges = [attributes for attributes in page.attributes("span") if attributes.get("class") == "badge"]
        assert not badges
        assert "is clearly best: its" not in page.text
    assert found["index.html"].text.count("none is clearly best.") == 3


def test_suite_in_progress(tmp_path, pages):
    missing = ["s3/tape/seed-2", "addition/rope/seed-0", "addition/rope/seed-1", "addition/rope/seed-2"]
    failed = {"s3/nope/seed-1": "FloatingPointError: loss <is> nan"}
    found = pages(write_suite(tmp_path / "part", tasks=SMALL, missing=missing, failed=failed))
    index = found["index.html"]
    assert "22 of 27 runs have finished, 1 failed" in index.text
    rows = {row["Encoding"]: row for row in index.table(OUT_OF_RANGE)}
    assert "2 of 3 seeds" in rows["tape"]["s3"]
    assert "2 of 3 seeds" in rows["nope"]["s3"]
    assert "1 failed" in rows["nope"]["s3"]
    assert rows["rope"]["addition"] == "\N{EN DASH}0 of 3 seeds"
    assert index.table("Runs that failed in the last attempt") == [
        {"Run": "s3/nope/seed-1", "Why": "FloatingPointError: loss <is> nan (exit code 1)"}
    ]
    assert index.table("Tasks")[1]["Finished"] == "7 of 9"
    runs = {(row["Encoding"], row["Seed"]): row for row in found["s3.html"].table("Every run")}
    assert runs["tape", "2"]["State"] == "not finished"
    assert runs["nope", "1"]["State"].startswith("failedFloatingPointError")
    assert runs["rope", "0"]["Result line"] == "JSON"
    assert "7 of 9 runs have finished; the failed ones, 1, count in no figure" in found["s3.html"].text
    rows = {row["Encoding"]: row for row in found["addition.html"].table("Out of range: more is better")}
    assert rows["rope"]["Seeds"] == "0 of 3"
    assert rows["tape clearly best"]["Difference to rope (points), same seeds"] == "\N{EN DASH}", (
        "no seed to compare with"
    )


def test_nothing_finished(tmp_path, pages):
    names = [f"s3/{encoding}/seed-0" for encoding in ("rope", "nope", "tape")]
    found = pages(write_suite(tmp_path / "new", tasks={"s3": TASKS["s3"]}, seeds=[0], missing=names))
    assert "0 of 3 runs have finished" in found["index.html"].text
    assert "No run of this task has finished yet." in found["s3.html"].text
    assert OUT_OF_RANGE not in found["index.html"].captions


def test_one_encoding_and_one_seed(tmp_path, pages):
    found = pages(write_suite(tmp_path / "one", tasks={"s3": TASKS["s3"]}, encodings={"tape": {}}, seeds=[5]))
    assert "tape alone has scores" in found["s3.html"].text
    assert all("One seed proves nothing" in page.text for page in found.values())
    (row,) = found["s3.html"].table("Out of range: more is better")
    assert row["95 % interval of the mean"] == "\N{EN DASH}"
    assert "one seed" in found["index.html"].table(OUT_OF_RANGE)[0]["s3"]
    two = pages(write_suite(tmp_path / "two", tasks={"s3": TASKS["s3"]}, seeds=[5]))
    assert "but one seed proves nothing" in two["index.html"].text


def test_differences_are_of_the_same_seeds(tmp_path, pages):
    folder = write_suite(tmp_path / "paired", tasks={"passkey": TASKS["passkey"]}, missing=["passkey/rope/seed-0"])
    found = pages(folder)
    rows = {row["Encoding"]: row for row in found["passkey.html"].table("In range: more is better")}
    # In range the score is (1 + skill) / 2, and skills differ by 0.3 in every seed.
    assert rows["tape clearly best"]["Difference to rope (points), same seeds"] == "+15.0 clear+15.0 to +15.0"
    assert rows["rope"]["Difference to rope (points), same seeds"] == "0"
    assert rows["rope"]["Seeds"] == "2 of 3"


def test_result_lines_and_configurations_are_linked(tmp_path, pages):
    folder = write_suite(tmp_path / "files", tasks=SMALL, encodings={"tape": {"encoding_options": {"n": 4}}}, seeds=[3])
    found = pages(folder)
    site = folder / "site"
    assert (site / "results.jsonl").read_bytes() == (folder / "results.jsonl").read_bytes()
    assert (site / "suite.yaml").read_bytes() == (folder / "suite.yaml").read_bytes()
    targets = links(site, "s3.html", found["s3.html"])
    (line,) = [path for path in targets if path.suffix == ".json"]
    (config,) = [path for path in targets if path.suffix == ".yaml"]
    whole = [json.loads(text) for text in (folder / "results.jsonl").read_text().splitlines()]
    assert json.loads(line.read_text()) in whole
    assert json.loads(line.read_text())["name"] == "s3/tape/seed-3"
    assert yaml.safe_load(config.read_text())["model"]["encoding_options"] == {"n": 4}


def test_run_folders_are_not_needed_and_the_same_lines_give_the_same_site(tmp_path):
    folder = write_suite(tmp_path / "a", tasks=SMALL)
    other = tmp_path / "b"
    other.mkdir()
    for name in ("suite.yaml", "results.jsonl"):
        shutil.copy(folder / name, other / name)
    (folder / "s3" / "tape" / "seed-0").mkdir(parents=True)
    first, second = write_site(folder).parent, write_site(other, output=tmp_path / "elsewhere").parent
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    assert all((first / path).read_bytes() == (second / path).read_bytes() for path in files)


def test_labels_of_all_kinds(tmp_path, pages):
    tasks = dict.fromkeys(("a&b", "a<b>", "A&B", "index", "ü$x^$", "a-b"), TASKS["s3"])
    encodings = {label: {"encoding": "tape"} for label in ("_x", "<script>alert(1)<script>", "%41", "#1")}
    folder = write_suite(tmp_path / "odd", tasks=tasks, encodings=encodings, seeds=[0, 1])
    found = pages(folder)
    assert len(found) == 1 + len(tasks)
    assert len({name.lower() for name in found}) == len(found), "also where case does not count"
    titles = set()
    for name, page in found.items():
        assert len(page.attributes("script")) == 1
        assert all(path.is_file() for path in links(folder / "site", name, page))
        titles |= set(tasks) & set(page.text.split())
    assert titles == set(tasks)
    assert [row["Encoding"] for row in found["index.html"].table(OUT_OF_RANGE)] == list(encodings)
    assert len(list((folder / "site" / "runs").iterdir())) == len(tasks) * len(encodings) * 2


def test_task_without_a_report_of_its_own(tmp_path, pages):
    found = pages(write_suite(tmp_path / "own", tasks={"mine": {"name": "my_task"}}))
    assert [row["Encoding"] for row in found["index.html"].table(IN_RANGE)] == ["rope", "nope", "tape"]
    assert found["mine.html"].table("Score: more is better")[0]["Encoding"] == "tape clearly best"


def test_seeds_that_differ_in_more_than_the_seed_are_told(tmp_path, pages):
    folder = write_suite(tmp_path / "mixed", tasks={"s3": TASKS["s3"]})
    path = folder / "results.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    next(line for line in lines if line["name"] == "s3/tape/seed-1")["config"]["model"]["hidden_size"] = 64
    lines.append({**lines[0], "name": "gone/tape/seed-0"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = pages(folder)
    assert "The seeds of tape differ in more than the seed" in found["s3.html"].text
    assert "Left out, as the plan does not have them: gone/tape/seed-0" in found["index.html"].text


def test_differing_options_and_costs(tmp_path, pages):
    encodings = {"rope": {}, "wide": {"encoding": "tape", "intermediate_size": 700}}
    page = pages(write_suite(tmp_path / "options", tasks={"s3": TASKS["s3"]}, encodings=encodings))["s3.html"]
    rows = {row["Key"]: (row["rope"], row["wide"]) for row in page.table("Options in which the encodings differ")}
    assert rows == {"model.encoding": ("rope", "tape"), "model.intermediate_size": ("not set", "700")}
    costs = page.table("What the runs took")
    assert [row["Parameters"] for row in costs] == ["790,528", "791,528"]
    assert costs[0]["Training time, median"] == "18 min 21 s"
    assert costs[0]["Tokens read"] == "1,234,567 to 1,234,569"


def test_heat_maps_are_medians_over_seeds(tmp_path, pages):
    page = pages(write_suite(tmp_path / "maps", tasks={"addition": TASKS["addition"]}))["addition.html"]
    alts = [image["alt"] for image in page.attributes("img") if image["alt"].startswith("Heat map")]
    assert len(alts) == 3
    assert alts[0].startswith("Heat map of rope, median of 3 seeds")
    assert "a map is none of the trained models" in page.text


def test_published_figures_are_apart_from_ours(tmp_path, pages):
    page = pages(write_suite(tmp_path / "published", tasks=SMALL))["addition.html"]
    (ours,) = [caption for caption in page.captions if caption.startswith("Measured here")]
    assert ours == "Measured here: whole grid"
    assert [row["Encoding"] for row in page.table(ours)] == ["tape", "nope", "rope"]
    theirs = {row["Encoding"]: row for row in page.table(CAPTION)}
    assert theirs["TAPE"] == {"Encoding": "TAPE", "Trained to 40": "32.82", "Trained to 20": "41.42"}
    assert "not measured here" in CAPTION
    assert "arXiv 2501.00712" in page.text


@pytest.mark.parametrize("task", ["addition", "language_modelling"])
def test_published_tables_are_whole(task):
    for entry in published(task):
        assert entry.source
        assert entry.setting
        assert all(len(row) == len(entry.table.headers) for row in entry.table.rows)
    assert published("copy") == []


def test_site_replaces_an_older_one_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = write_suite(tmp_path / "again", tasks=SMALL)
    site = write_site(folder).parent
    (site / "stale.html").touch()
    write_site(folder)
    assert not (site / "stale.html").exists()
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    monkeypatch.setattr("tape_pe.report.site.task_page", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_site(folder)
    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before
    assert not list(folder.glob(".partial*"))


def test_replacing_a_folder_that_fails_brings_the_old_one_back(tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    (old / "kept").touch()
    with pytest.raises(FileNotFoundError):
        replace_folder(old, tmp_path / "missing")
    assert (old / "kept").is_file()


def test_refuses_to_replace_what_is_not_a_site(tmp_path):
    folder = write_suite(tmp_path / "suite", tasks=SMALL)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "index.html").write_text("mine")
    with pytest.raises(FileExistsError, match=r"output='.*precious': it holds something other"):
        write_site(folder, output=precious)
    assert (precious / "index.html").read_text() == "mine"
    with pytest.raises(FileExistsError, match="output="):
        write_site(folder, output=folder)


def test_refuses_what_is_not_a_suite(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a suite's folder"):
        write_site(tmp_path)
    (tmp_path / "suite.yaml").write_text("name: x\nencodings: {}\n")
    with pytest.raises(ValueError, match=r"suite\.yaml: tasks is missing"):
        write_site(tmp_path)
    folder = write_suite(tmp_path / "torn", tasks=SMALL)
    for name in ("failures.jsonl", "results.jsonl"):  # what an interruption cut off is left out
        with (folder / name).open("a") as lines:
            lines.write('{"name": ')
    write_site(folder)
    (folder / "failures.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"failures\.jsonl, line 1"):
        write_site(folder)


def test_overview_for_the_terminal(tmp_path):
    failed = {"s3/nope/seed-1": "out of memory"}
    text = overview_text(read_suite(write_suite(tmp_path / "text", tasks=SMALL, failed=failed)))
    assert text.split()[:4] == ["Task", "Score", "Encoding", "Seeds"]
    assert len(re.findall(r"^(addition|s3|text) ", text, re.MULTILINE)) == 18, "two scores of three encodings each"
    assert re.search(r"^s3 +Out of range +nope +2 of 3 ", text, re.MULTILINE)
    assert "26 of 27 runs have finished\ns3/nope/seed-1 failed: out of memory (exit code 1)" in text
    assert re.search(r"^addition +Out of range +tape .* clearly best$", text, re.MULTILINE)
