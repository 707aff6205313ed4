"""The bench: what a cell's row says, its bound and peers, its command, and cells that really run on loopback."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sweep.bench.__main__ import RESULTS, main
from sweep.bench.cells import CONTESTANTS, Row, summarise
from sweep.bench.loss import Reached, reached
from sweep.bench.loss import main as loss_main
from sweep.bench.network import why_not
from sweep.bench.report import draw, judge, table, write
from sweep.bench.rows import read_rows, write_rows

ROOT = Path(__file__).parents[1]
ROW = Row(
    method="tsr",
    workers=4,
    rate_mbit=100.0,
    tokens=64,
    step_s=3.0,
    compute_s=0.5,
    communication_s=2.0,
    optimizer_s=0.5,
    payload=20e6,
    peak_payload=40_000_000,
    first_payload=60_000_000,
    collectives=1.5,
    overlapped=True,
    wire_ratio=1.005,
    goodput_mbit=96.0,
    dropped=0,
    cores=2,
)


def worker(*, slow: float, kinds: list[dict[str, int]], wire: int) -> dict[str, Any]:
    """What a worker writes: three steps of each kind, of which it takes `slow` times 1, 2 and 9 s times the number."""
    steps = [
        {
            "number": kind["number"],
            "step": slow * kind["number"] * seconds,
            "compute": slow * kind["number"] * seconds / 2,
            "communication": slow * kind["number"] * seconds / 4,
            "optimizer": slow * kind["number"] * seconds / 4,
            "payload": kind["payload"],
        }
        for kind in kinds
        for seconds in (1.0, 2.0, 9.0)
    ]
    return {"goodput": 1e6 / slow, "first": 700, "kinds": kinds, "steps": steps, "wire": wire}


def test_a_row_weighs_medians_of_the_slowest_worker_by_the_schedule() -> None:
    kinds = [
        {"number": 2, "count": 99, "payload": 100, "collectives": 1},
        {"number": 5, "count": 1, "payload": 1100, "collectives": 3},
    ]
    # Three steps of either kind send 3600 bytes, a ring of four 2 * 3 / 4 of each.
    results = [
        worker(slow=slow, kinds=kinds, wire=wire) for slow, wire in ((1.0, 5400), (2.0, 5454), (1.5, 5400), (1.0, 5400))
    ]
    row = summarise(results, method="tsr", rate_mbit=10.0, tokens=64, overlapped=True, dropped=3)
    assert row.step_s == pytest.approx(2 * 2 * (2 * 99 + 5) / 100)
    assert row.compute_s == pytest.approx(row.step_s / 2)
    assert row.optimizer_s == row.communication_s == pytest.approx(row.step_s / 4)
    assert row.payload == pytest.approx((99 * 100 + 1100) / 100)
    assert row.collectives == pytest.approx(1.02)
    assert (row.peak_payload, row.first_payload, row.workers, row.dropped) == (1100, 700, 4, 3)
    assert row.wire_ratio == pytest.approx((5400 * 3 + 5454) / 4 / 5400)
    assert row.goodput_mbit == pytest.approx(4.0)


def test_the_bound_is_compute_or_the_wire() -> None:
    wire = 20e6 * 2 * 3 / 4 * 8 / 96e6
    assert judge([ROW])[0].bound == pytest.approx(wire)
    assert judge([replace(ROW, compute_s=7.0, optimizer_s=0.25)])[0].bound == 7.0


def test_the_wire_is_as_fast_as_any_cell_on_the_same_links_found_it() -> None:
    faster = replace(ROW, method="adamw", goodput_mbit=120.0)
    elsewhere = replace(ROW, method="galore", rate_mbit=1000.0, goodput_mbit=960.0)
    for rows in ([ROW, faster, elsewhere], [faster, elsewhere, ROW]):
        bounds = {judged.row.method: judged.bound for judged in judge(rows)}
        assert bounds[ROW.method] == pytest.approx(20e6 * 2 * 3 / 4 * 8 / 120e6)


def test_the_table_compares_with_ddp_of_the_same_network() -> None:
    baseline = replace(ROW, method="ddp_adamw", step_s=30.0, communication_s=29.0, payload=232e6)
    elsewhere = replace(baseline, rate_mbit=1000.0, step_s=1.0)
    half = replace(elsewhere, method="ddp_bf16")
    shown = table(judge([ROW, baseline, elsewhere, half]), title="t", notes=["n"])
    cells = dict(zip(shown.columns, (cell.text for cell in shown.cells[0]), strict=True))
    assert (cells["payload ×"], cells["communication ×"], cells["step ×"]) == ("11.60", "14.50", "10.00")
    assert cells["payload × bf16"] == "-"
    assert shown.notes == ("n",)


def test_the_table_has_no_columns_of_peers_that_were_not_measured(tmp_path: Path) -> None:
    baseline = replace(ROW, method="ddp_adamw")
    for rows, last, noted in (([ROW], "step ÷ bound", False), ([ROW, baseline], "step ×", True)):
        assert table(judge(rows), title="t", notes=["n"]).columns[-1] == last
        text = write(rows, tmp_path, title="t", judge_name="hosts' interfaces", readme=None)
        assert ("ddp_adamw's figure over the method's" in text) == noted


def test_a_page_gets_the_slowest_link_of_most_workers_and_how_far_any_cell_is_from_the_ledger(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin b -->\n<!-- end b -->\n")
    rows = [
        replace(ROW, method="adamw", workers=2, rate_mbit=10.0, wire_ratio=0.98),
        replace(ROW, method="adamw", rate_mbit=1000.0, wire_ratio=1.02),
        replace(ROW, rate_mbit=None, wire_ratio=None),
        ROW,
    ]
    text = write(rows, tmp_path, title="t", judge_name="hosts' interfaces", readme=(str(page), "b"))
    assert len(re.findall(r"^\| +\d", text, re.M)) == 4
    (line,) = re.findall(r"^\| +\d.*", page.read_text(), re.M)
    assert [cell.strip() for cell in line.split("|")[1:5]] == ["4", "100", "96", "tsr"]
    note = "Over all 3 cells of this bench (2 methods, 2 and 4 workers) the hosts' interfaces sent 0.9800 to 1.0200"
    assert note in page.read_text()


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [ROW, replace(ROW, method="adamw", rate_mbit=None, wire_ratio=None, overlapped=False, step_s=0.1 + 0.2)]
    write_rows(tmp_path / RESULTS, rows)
    assert read_rows(tmp_path / RESULTS, Row) == rows
    assert read_rows(tmp_path / "none.csv", Row) == []
    text = (tmp_path / RESULTS).read_text()
    (tmp_path / RESULTS).write_text(text.replace(",True,", ",yes,"))
    with pytest.raises(ValueError, match=r"line 2: .*yes"):
        read_rows(tmp_path / RESULTS, Row)
    (tmp_path / RESULTS).write_text(text.replace("cores", "kernels"))
    with pytest.raises(ValueError, match="no column cores"):
        read_rows(tmp_path / RESULTS, Row)


def test_the_figure_marks_every_cell_of_limited_links(tmp_path: Path) -> None:
    rows = [
        replace(ROW, method=name, rate_mbit=rate) for name in ("tsr", "ddp_adamw") for rate in (None, 100.0, 1000.0)
    ]
    drawn = draw(rows, tmp_path)
    assert drawn.png.is_file()
    assert drawn.pdf.is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "tsr,adam"], "--methods: each must be one of adamw, .*, got 'adam'"),
        (["--workers", "1"], "--workers: each must be a whole number from 2 to 254, got '1'"),
        (["--rates", "none,fast"], "--rates: each must be none or Mbit/s between .*, got 'fast'"),
        (["--rates", "0"], "--rates: .*, got '0'"),
        (["--repeats", "0"], "--repeats must be a whole number from 1, got 0"),
        (["--loopback", "--rates", "100"], "--loopback limits no rate: --rates must be none, got 100"),
        (
            ["--model", "gpt"],
            "--set: model=gpt: the configuration has no model/gpt; there are llama_130m, .*llama_60m, .*roberta_base$",
        ),
        (["--set", "rank.linear=100000"], "rank.linear=100000 is too large"),
        (["--set", "comm.speed=1"], "comm.speed"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["--out", str(out), *arguments]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    assert re.search(said, error), error
    assert not out.exists()


def test_without_root_there_is_a_reason_and_a_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    small = ["--experiment", "proxy", "--model", "llama_9m", "--methods", "adamw"]
    assert main(["--out", str(tmp_path / "out"), *small]) == 1
    assert "needs root" in (error := capsys.readouterr().err)
    assert "--loopback" in error
    assert loss_main(["--out", str(tmp_path / "out"), "--target", "6"]) == 1
    assert "needs root" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rates", "none"], "--rates: each must be Mbit/s between .*, got 'none'"),
        (["--methods", "sgd"], "--methods: each must be one of adamw, .*, got 'sgd'"),
        (["--workers", "1"], "--workers must be a whole number from 2, got 1"),
        (["--target", "nan"], "--target must be a positive loss, in nats, got nan"),
        (["--target", "inf"], "--target must be a positive loss, in nats, got inf"),
        (
            ["--experiment", "nothing"],
            "--experiment or --set: experiment=nothing: .* has no experiment/nothing; there are .*slow_link",
        ),
        (["--set", "trainer.stepz=4"], "--set: trainer.stepz=4: the configuration has no trainer.stepz$"),
        (["--set", "trainer.steps=-4"], "--set: trainer.steps must be .*, got -4"),
        (["--readme", "nowhere.md", "loss"], "--readme must begin with a file that exists, got 'nowhere.md'"),
    ],
)
def test_a_mistake_about_the_time_to_a_loss_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loss_main(["--out", str(tmp_path / "out"), "--target", "6", *arguments]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert re.search(said, error), error
    assert "\n" not in error
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bench without root: ours, whose message is small, and torch's peers."""
    if shutil.which("ss") is None:
        pytest.skip("ss, which counts the bytes of TCP sockets, is not installed")
    out = tmp_path_factory.mktemp("bench")
    command = [
        sys.executable,
        "-m",
        "sweep.bench",
        "--out",
        str(out),
        "--loopback",
        "--workers",
        "2",
        "--rates",
        "none",
    ]
    small = ["--experiment", "proxy", "--model", "llama_9m", "--repeats", "10", "--length", "16"]
    methods = ["--methods", "tsr_bf16,ddp_adamw,ddp_bf16,ddp_powersgd"]
    subprocess.run([*command, *small, *methods], cwd=ROOT, check=True, timeout=300)
    return out


def test_the_sockets_carried_what_the_ledger_says(loopback: Path) -> None:
    rows = {row.method: row for row in read_rows(loopback / RESULTS, Row)}
    assert set(rows) == {"tsr_bf16", "ddp_adamw", "ddp_bf16", "ddp_powersgd"}
    for row in rows.values():
        assert row.wire_ratio == pytest.approx(1.0, abs=0.03), row.method
        assert row.step_s > row.compute_s > 0
    assert rows["ddp_adamw"].payload == 2 * rows["ddp_bf16"].payload
    assert rows["ddp_powersgd"].first_payload == rows["ddp_adamw"].payload > 5 * rows["ddp_powersgd"].payload
    assert rows["ddp_adamw"].payload > 20 * rows["tsr_bf16"].payload
    assert "tsr_bf16" in (loopback / "bench.md").read_text()


def test_a_bench_goes_on_where_it_was_and_mixes_no_steps(loopback: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--experiment", "proxy", "--model", "llama_9m", "--repeats", "10", "--length", "16"]
    again = ["--out", str(loopback), "--loopback", "--workers", "2", "--rates", "none", "--methods", "tsr_bf16"]
    before = (loopback / RESULTS).read_text()
    assert main([*again, *small]) == 0
    assert "measured before" in capsys.readouterr().out
    assert (loopback / RESULTS).read_text() == before
    assert main([*again, *small[:-1], "32"]) == 1
    assert "another bench" in capsys.readouterr().err
    other = {"tsr_bf16": replace(CONTESTANTS["tsr_bf16"], overrides=("optimizer=tsr",))}
    with mock.patch.dict(CONTESTANTS, other):  # the same name, another method
        assert main([*again, *small]) == 1
    assert "another bench" in capsys.readouterr().err


def test_the_time_to_a_loss_is_that_of_the_steps_before_it() -> None:
    rows = [
        {
            "step": step,
            "time/step_s": float(step),
            "comm/total_bytes": 10 * step,
            **({"eval/loss": loss} if loss else {}),
        }
        for step, loss in enumerate((None, 7.0, None, 6.0, 6.5, 5.0), start=1)
    ]
    assert reached(rows, 6.0) == (4, 1.0 + 2 + 3 + 4, 40)
    assert reached(rows, 7.0) == (2, 3.0, 20)
    assert reached(rows, 4.9) is None


def test_on_a_limited_link_the_interface_carries_the_ledger_and_the_bound_holds(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    small = ["--experiment", "proxy", "--model", "llama_9m", "--repeats", "2", "--length", "16", "--workers", "2"]
    assert main(["--out", str(tmp_path), *small, "--rates", "none,50", "--methods", "adamw"]) == 0
    unlimited, limited = read_rows(tmp_path / RESULTS, Row)
    assert (unlimited.rate_mbit, limited.rate_mbit) == (None, 50.0)
    for row in (unlimited, limited):
        assert row.wire_ratio == pytest.approx(1.0, abs=0.03)
    assert limited.goodput_mbit < 50
    bound = judge([limited])[0].bound
    assert min(bound, 1.02 * limited.step_s) > limited.payload * 8 / 50e6
    assert (tmp_path / "bench.png").is_file()


def test_training_on_a_limited_link_gives_the_time_to_a_loss_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    (readme := tmp_path / "README.md").write_text("<!-- begin loss -->\n<!-- end loss -->\n")
    command = ["--out", str(tmp_path / "out"), "--target", "100", "--experiment", "quickstart", "--rates", "1000"]
    few = ["--set", "trainer.steps=4", "trainer.eval_every=2", "trainer.eval_rows=16"]
    assert loss_main([*command, "--methods", "adamw", "--readme", str(readme), "loss", *few]) == 0
    (row,) = read_rows(tmp_path / "out" / "loss.csv", Reached)
    (metrics,) = (tmp_path / "out").rglob("metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert row.steps == 2
    assert row.seconds == pytest.approx(steps[0]["time/step_s"] + steps[1]["time/step_s"])
    assert row.payload == steps[1]["comm/total_bytes"]
    assert "| adamw" in readme.read_text()
    written = metrics.stat().st_mtime_ns
    assert loss_main([*command[:3], "0.5", *command[4:], "--methods", "adamw", *few]) == 0
    assert "never" in capsys.readouterr().out
    assert metrics.stat().st_mtime_ns == written
    assert [row.target for row in read_rows(tmp_path / "out" / "loss.csv", Reached)] == [100.0, 0.5]
