"""`tape bench` from its options to its page."""

import base64
import re
import subprocess
from dataclasses import replace

import pytest
import torch

from tape_pe.bench import memory
from tape_pe.bench.check import generation_seconds
from tape_pe.bench.memory import Job, peak_memory
from tape_pe.bench.options import PHASES, BenchOptions, Shape
from tape_pe.bench.page import write_costs_page
from tape_pe.bench.run import comparisons, run_bench
from tape_pe.bench.tables import bytes_text, count_tables, latest, seconds_text, tables, time_groups
from tape_pe.bench.variants import Variant
from tape_pe.cli import main
from tape_pe.models.decoder import LayerResult
from tape_pe.results import read_costs

SMALL = [
    "--heads", "2", "--head_dims", "8", "--lengths", "8,16", "--intermediate_size", "16", "--vocab_size", "32",
    "--new_tokens", "2", "--memory_lengths", "[]", "--seconds", "0.001", "--rounds", "1", "--threads", "1",
    "--device", "cpu",
]  # fmt: skip


def test_bench_writes_a_table_lines_and_a_page(tmp_path, capsys):
    output, phases = tmp_path / "new" / "bench.jsonl", ["forward+backward", "decode"]
    assert main(["bench", *SMALL, "--kv_heads", "1", "--phases", ",".join(phases), "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert "Decoder layer, forward+backward" in text
    assert "Cache of a middle layer" in text
    lines = read_costs(output)
    assert {line.kind for line in lines} == {"count", "cache", "saved", "time"}
    assert {line.settings["phase"] for line in lines if line.kind == "time"} == set(phases)
    assert {line.settings["level"] for line in lines if line.kind == "time"} == {"op", "layer", "model"}
    assert {line.settings["length"] for line in lines if line.kind == "time"} == {8, 16}
    for line in lines:
        assert line.settings["kv_heads"] == 1
        assert line.machine["device"] == "cpu"
        assert line.versions["torch"] == torch.__version__
        if line.kind == "time":
            assert line.metrics["seconds"]["median"] > 0
            assert line.metrics["baseline"].startswith(("rope", "tape"))
            assert line.settings["threads"] == 1
    page = output.with_suffix(".html").read_text(encoding="utf-8")
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "Cache of a middle layer" in page
    assert str(tmp_path) not in page + output.read_text(encoding="utf-8")


def test_every_encoding_and_backend_can_be_measured():
    names = ("nope", "alibi", "abacus")
    options = BenchOptions(
        levels=("layer", "model"),
        encodings=names,
        backends=("reference",),
        lengths=(6,),
        heads=(2,),
        head_dims=(8,),
        layers=1,
        intermediate_size=8,
        new_tokens=2,
        memory_lengths=(),
        seconds=0.001,
        rounds=1,
        threads=(1,),
        device="cpu",
    )
    lines = run_bench(options)
    for name in names:
        mine = [line.settings for line in lines if line.name == f"{name} (reference)" and line.kind == "time"]
        assert len({(settings["level"], settings["phase"]) for settings in mine}) == 4 + len(PHASES)
    assert {line.name for line in lines if line.kind == "count"} == {"rope", *names}


def test_axes_are_multiplied():
    options = BenchOptions(
        levels=("op",), phases=("decode",), lengths=(8, 16), batch_sizes=(1, 2), threads=(1, 2), device="cpu"
    )
    found = [(one.operation, one.shape.length, one.shape.batch_size, one.threads) for one in comparisons(options)]
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2  # attention and update


def _tokens_of(output):
    return output.hidden_states if isinstance(output, LayerResult) else output.logits


def test_decoding_leaves_the_cache_as_it_was():
    """A second and third call compute what the first did."""
    options = BenchOptions(
        levels=("layer", "model"), phases=("decode",), lengths=(5,), heads=(2,), head_dims=(8,), layers=3, device="cpu"
    )
    for comparison in comparisons(options):
        for call in comparison.build().values():
            first, second, third = (_tokens_of(call()) for _ in range(3))
            torch.testing.assert_close(second, first)
            torch.testing.assert_close(third, first)


def test_generation_takes_a_time_for_every_token():
    shape = Shape(length=40, heads=2, kv_heads=2, head_dim=8, intermediate_size=8, vocab_size=32, new_tokens=3)
    chosen = [Variant("rope", "sdpa"), Variant("tape", "blockwise")]
    seconds = generation_seconds(shape, chosen)
    assert set(seconds) == {"rope (sdpa)", "tape (blockwise)"}
    assert all(len(values) == 3 and min(values) > 0 for values in seconds.values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "0"], "lengths=(0,): it must hold positive integers, each only once"),
        (["--lengths", "8,8"], "lengths=(8, 8): it must hold"),
        (["--lengths", ""], "lengths=(): it must hold at least one value"),
        (["--lengths", "many"], "lengths"),
        (["--rounds", "0"], "rounds=0: it must be a positive integer"),
        (["--seconds", "-1"], "seconds=-1.0: it must be a positive number"),
        (["--levels", "chip"], "levels='chip': it must be one of op, layer, model"),
        (["--phases", "sideways"], "phases='sideways': it must be one of forward"),
        (["--dtypes", "int8"], "dtypes='int8': it must be one of float32"),
        (["--encodings", "ropes"], "ropes"),
        (["--backends", "magic"], "backend='magic': known backends are"),
        (["--kv_heads", "5"], "num_key_value_heads=5: must divide num_attention_heads=12"),
        (["--head_dims", "7"], "head_dim"),
        (["--clock", "sun"], "clock='sun': it must be one of wall, cpu"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--sizes", "8"], "sizes is not an option"),
    ],
)
def test_wrong_values_are_refused_before_anything_starts(capsys, monkeypatch, flags, message):
    monkeypatch.setattr("tape_pe.bench.run.run_bench", lambda *_, **__: pytest.fail("started"))
    device = [] if "--device" in flags else ["--device", "cpu"]
    assert main(["bench", *device, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_output_that_is_something_else_is_refused(tmp_path, capsys):
    assert main(["bench", *SMALL, "--output", str(tmp_path)]) == 2
    assert "output is a folder" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text('{"task": "perplexity"}\n')
    assert main(["bench", *SMALL, "--output", str(other)]) == 2
    assert "not a cost line" in capsys.readouterr().err


def test_peak_memory_is_that_of_the_call():
    """Attention by the reference builds N x N weights for each head, 4 N^2 H bytes, and some copies of them."""
    shape = Shape(length=512, heads=2, kv_heads=2, head_dim=8, intermediate_size=8, vocab_size=8, layers=1)
    (peak,) = peak_memory([Job(shape, "forward", Variant("rope", "reference"), "cpu", 1)])
    weights = 4 * 512**2 * 2
    assert weights < peak < 10 * weights


def test_a_process_that_fails_is_an_error(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nMemoryError: too large\n")
    monkeypatch.setattr(memory.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"forward of rope .sdpa. at 1024 tokens failed: MemoryError: too large"):
        peak_memory([Job(Shape(), "forward", Variant("rope", "sdpa"), "cpu", 1)])


def test_the_page_draws_time_against_length(tmp_path, make_time):
    lines = [make_time("rope (sdpa)", n, n / 1000) for n in (128, 256)]
    lines += [make_time("tape (blockwise)", n, n / 900, 1.11) for n in (128, 256)]
    page = write_costs_page(tmp_path / "page.html", lines).read_text(encoding="utf-8")
    assert "tape (blockwise) takes 1.11 times as long as rope (sdpa)" in page
    assert "Some CPU, 2 cores" in page
    assert "threads: 1" in page
    assert "aaaaaaaaaaaa+dirty" in page
    pictures = [base64.b64decode(one).decode() for one in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", page)]
    (picture,) = pictures
    assert "rope (sdpa)" in picture
    assert ">256<" in picture
    with pytest.raises(ValueError, match="lines is empty"):
        write_costs_page(tmp_path / "page.html", [])


def test_groups_are_told_apart_by_what_differs(make_time):
    lines = [make_time("rope (sdpa)", 128, 0.1, heads=heads, phase=phase) for heads in (2, 4) for phase in ("a", "b")]
    assert [title for title, _ in time_groups(lines)] == [
        "Decoder layer, a, heads=2",
        "Decoder layer, b, heads=2",
        "Decoder layer, a, heads=4",
        "Decoder layer, b, heads=4",
    ]


def test_tables_hold_the_latest_lines(make_time):
    lines = [make_time("rope (sdpa)", 128, 0.1), make_time("tape (x)", 128, 0.2), make_time("rope (sdpa)", 128, 0.4)]
    (table,) = tables(latest(lines))
    assert [[cell.text for cell in row[:5]] for row in table.rows] == [
        ["rope (sdpa)", "128", "400 ms", "360 ms to 440 ms", "1"],
        ["tape (x)", "128", "200 ms", "180 ms to 220 ms", "1.00"],
    ]


def test_ratios_of_counts_are_to_the_least_rope_of_the_same_sizes(make_time):
    sizes = {"length": 8, "batch_size": 1, "heads": 2, "kv_heads": 2, "head_dim": 4}
    line = replace(make_time("rope (a)", 8, 1.0), kind="saved", settings=sizes, metrics={"bytes": 100})
    lines = [
        line,
        replace(line, name="rope (b)", metrics={"bytes": 80}),
        replace(line, name="tape (a)", metrics={"bytes": 120}),
        replace(line, name="rope (a)", settings={**sizes, "length": 16}, metrics={"bytes": 10}),
    ]
    (table,) = count_tables(lines)
    assert [row[-1].text for row in table.rows] == ["1.25", "1.00", "1.50", "1.00"]


def test_texts_of_times_and_sizes():
    assert [seconds_text(value) for value in (12.34, 0.0123, 4.56e-6)] == ["12.3 s", "12.3 ms", "4.56 µs"]
    assert [bytes_text(value) for value in (3 * 2**20, 9216)] == ["3.0 MiB", "9,216 B"]
