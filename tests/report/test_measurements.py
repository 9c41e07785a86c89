"""Tables and the page of measurements show the numbers of their lines."""

import pytest

from tape_pe.report.measurements import passkey_table, perplexity_table, write_passkey_page
from tape_pe.results import Measurement


def cell(length, depth, exact, first, model="m", seeds=20) -> Measurement:
    settings = {"length": length, "depth": depth, "seeds": seeds}
    return Measurement("passkey", model, settings, None, {}, 10, 1.5, {"exact_match": exact, "first_number": first})


def test_perplexity_table():
    metrics = {"nll_sum": 100.0, "nll": 2.0, "tokens": 50, "perplexity": 7.389056}
    line = Measurement("perplexity", "m", {"length": 1024, "stride": 256}, None, {}, 10, 65.0, metrics)
    row = perplexity_table([line]).splitlines()[-1].split()
    assert row == ["m", "1,024", "256", "50", "2.0000", "7.389", "1", "min", "05", "s"]


def test_passkey_table():
    rows = passkey_table([cell(128, 0.5, 0.95, 1.0), cell(256, None, 0.0, 0.1)]).splitlines()[2:]
    assert rows[0].split() == ["m", "128", "0.5", "20", "95.0", "%", "100.0", "%", "1.5", "s"]
    assert rows[1].split()[:4] == ["m", "256", "any", "20"]


def test_passkey_page(tmp_path, parse):
    measured = [
        cell(128, 0.0, 0.95, 1.0),
        cell(128, 1.0, 0.5, 0.6),
        cell(1024, 1.0, 0.0, 0.25),
        cell(128, None, 1, 1, "n"),
    ]
    html = write_passkey_page(tmp_path / "new" / "page.html", measured).read_text(encoding="utf-8")
    page = parse(html)
    assert page.table("m: exact match in %, by depth and length") == [
        {"Depth": "0", "128": "95.0", "1,024": "\N{EN DASH}"},
        {"Depth": "1", "128": "50.0", "1,024": "0.0"},
    ]
    assert page.table("m: first number in %, by depth and length")[1] == {"Depth": "1", "128": "60.0", "1,024": "25.0"}
    assert page.table("n: exact match in %, by depth and length") == [{"Depth": "any", "128": "100.0"}]
    assert "Prompts of exactly 128 and 1,024 tokens" in page.text
    assert "uncertain by about 22 points" in page.text
    assert all(
        image["src"].startswith("data:image/svg+xml;base64,") and image["alt"] for image in page.attributes("img")
    )
    assert "prefers-color-scheme: dark" in html


def test_page_refuses(tmp_path):
    with pytest.raises(ValueError, match="measured is empty"):
        write_passkey_page(tmp_path / "page.html", [])
    with pytest.raises(IsADirectoryError, match="output is a folder"):
        write_passkey_page(tmp_path, [cell(128, 0.0, 1, 1)])
