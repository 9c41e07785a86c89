"""The tables of committed results are what their lines say."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load_tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "experiments" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_the_lines():
    assert (ROOT / "results" / "README.md").read_text(encoding="utf-8") == load_tables().page()


def test_the_tables_of_costs_are_made_from_the_lines():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert text == load_tables().performance()
    for name in ("targets", "counts", "times"):
        assert text.count(f"<!-- table: {name} -->\n") == 1
    assert text.count("<!-- end -->") == 3
    assert "Not measured yet" not in text


def test_medians_and_extremes():
    tables = load_tables()
    assert tables.spread([3.0, 1.0, 2.0], 2).text == "2.00 (1.00 to 3.00)"
    assert tables.spread([1.5], 1).text == "1.5"


def test_lines_name_no_place_of_one_machine():
    for path in (ROOT / "results").rglob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            json.loads(line)
            assert "/root" not in line
            assert "/tmp" not in line
