"""The report on small, made-up run directories: every number in it is known beforehand."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sweep.compare import comparable, missing_seeds, with_ratios
from sweep.report import main, table_of
from sweep.results import Results
from sweep.runs import find_runs, read_curves, read_runs
from tests.made_up import STEPS, make_run, rows, run_report


def test_numbers_of_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {0: 3.9, 1: 4.1, 2: 4.3}
    for seed, loss in losses.items():
        make_run(tmp_path / "runs" / f"tsr_{seed}", "tsr", loss=loss, step_bytes=500_000, seed=seed)
    make_run(tmp_path / "runs" / "deep" / "er" / "adamw", "adamw")
    code, out = run_report(tmp_path / "runs")
    assert code == 0
    text = (out / "table.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()

    adamw, tsr = rows(text)
    assert (adamw["method"], adamw["n"], adamw["eval loss"]) == ("adamw", "1 of 3", "4.000")
    assert (tsr["method"], tsr["n"], tsr["lr"]) == ("tsr", "3", "0.01")
    assert tsr["eval loss"] == "4.100 ± 0.200"
    perplexities = [math.exp(loss) for loss in losses.values()]
    assert tsr["perplexity"] == f"{statistics.mean(perplexities):.2f} ± {statistics.stdev(perplexities):.2f}"
    assert (adamw["tokens (M)"], adamw["bytes/step (MB)"], adamw["peak bytes (MB)"]) == ("0.04000", "8.000", "16.00")
    assert (tsr["bytes/step (MB)"], tsr["bytes/step, paper (MB)"], tsr["total bytes (MB)"]) == (
        "0.5000",
        "0.2500",
        "20.00",
    )
    assert (tsr["÷ adamw"], tsr["÷ adamw, paper"], adamw["÷ adamw"]) == ("0.0625", "0.0625", "1.00")
    assert (tsr["optimizer state (MB)"], tsr["duration (s)"]) == ("1.235", "12.00")

    table = pd.read_csv(out / "table.csv")
    assert list(table["method"]) == ["adamw", "tsr", "tsr", "tsr"]
    assert list(table["seed"]) == [0, 0, 1, 2]
    assert list(table["eval/perplexity"])[1:] == perplexities
    assert list(table["comm/bytes_per_step/adamw"]) == [1.0, 0.0625, 0.0625, 0.0625]
    assert set(table["git_commit"]) == {"c0ffee"} and set(table["world_size"]) == {2}
    assert list(table["config_hash"]) == ["adamw0", "tsr0", "tsr1", "tsr2"]


@pytest.mark.usefixtures("no_figure")
def test_large_values_are_shown_in_g(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", step_bytes=1_500_000_000)
    _, out = run_report(tmp_path / "runs")
    (row,) = rows((out / "table.md").read_text())
    assert row["bytes/step (GB)"] == "1.500"


@pytest.mark.usefixtures("no_figure")
def test_runs_are_pooled_only_over_seeds(tmp_path: Path) -> None:
    for rank in (16, 8):
        for seed in (0, 1):
            overrides = {"rank.linear": rank, "logger.name": f"{rank}-{seed}", "runs_dir": f"runs{seed}"}
            make_run(tmp_path / "runs" / f"{rank}_{seed}", "tsr", seed=seed, loss=float(rank), config=overrides)
    make_run(tmp_path / "runs" / "larger_world", "tsr", config={"rank.linear": 8}, summary={"world_size": 4})
    _, out = run_report(tmp_path / "runs")
    settings = {row["settings"]: (row["n"], row["eval loss"]) for row in rows((out / "table.md").read_text())}
    assert settings == {
        "rank.linear=8, world_size=2": ("2", "8.000"),
        "rank.linear=8, world_size=4": ("1 of 2", "4.000"),
        "rank.linear=16, world_size=2": ("2", "16.00"),
    }
    assert list(settings)[-1].startswith("rank.linear=16")


def test_a_repeat_is_not_a_further_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs" / "once")
    make_run(tmp_path / "runs" / "twice")
    code, _ = run_report(tmp_path / "runs")
    assert code == 1 and "twice" in capsys.readouterr().err


def test_a_run_given_twice_counts_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a")
    assert find_runs([tmp_path / "runs", run]) == [run]


@pytest.mark.usefixtures("no_figure")
@pytest.mark.parametrize(
    ("config", "summary", "named"),
    [
        ({"model.name": "llama_9m"}, {}, "model=llama_9m"),
        ({"model.vocab_size": 128}, {}, "model.vocab_size=128"),
        ({}, {"tokens": 77}, "tokens=77"),
        ({}, {"data": {"corpus_sha256": "d" * 64, "tokenizer_sha256": "b" * 64}}, "corpus_sha256=dddddddd"),
        ({}, {"data": {"corpus_sha256": "a" * 64, "tokenizer_sha256": "e" * 64}}, "tokenizer_sha256=eeeeeeee"),
        ({}, {"data": {}}, "corpus_sha256=null"),
        ({}, {"git_commit": "decade"}, "git_commit=decade"),
    ],
)
def test_mixtures_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    summary: dict[str, Any],
    named: str,
) -> None:
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b", seed=1, config=config, summary=summary)
    code, out = run_report(tmp_path / "runs")
    assert code == 1 and not out.exists()
    assert named in capsys.readouterr().err

    code, out = run_report(tmp_path / "runs", "--allow-mixed")
    table = rows((out / "table.md").read_text())
    assert code == 0
    assert [row["n"] for row in table] == ["1", "1"]
    assert sum(named in row["mixed"] for row in table) == 1


@pytest.mark.usefixtures("no_figure")
def test_ratio_only_to_a_baseline_of_the_same_model(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", step_bytes=4_000_000)
    make_run(tmp_path / "runs" / "b", "tsr", step_bytes=1_000_000)
    make_run(tmp_path / "runs" / "c", "tsr", step_bytes=1_000_000, config={"model.name": "llama_9m"})
    _, out = run_report(tmp_path / "runs", "--allow-mixed")
    ratios = {row["mixed"]: row["÷ adamw"] for row in rows((out / "table.md").read_text()) if row["method"] == "tsr"}
    assert ratios == {"model=llama_tiny": "0.250", "model=llama_9m": "-"}


@pytest.mark.usefixtures("no_figure")
def test_runs_that_are_not_done_are_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "good")
    trace = "Traceback …\nValueError: gradient of 'x|y' is not finite at step 3"
    failed = make_run(tmp_path / "runs" / "failed", "tsr", config={"optimizer.lr": 1.0})
    (failed / "summary.json").write_text(json.dumps({"status": "failed", "error": trace}))
    (make_run(tmp_path / "runs" / "killed", "galore") / "summary.json").unlink()
    (make_run(tmp_path / "runs" / "torn", "galore") / "config.yaml").write_text("optimizer: {name")
    lacking = make_run(tmp_path / "runs" / "lacking", "one_sided")
    (lacking / "summary.json").write_text(json.dumps({"status": "done"}))
    code, out = run_report(tmp_path / "runs")
    text = (out / "table.md").read_text()
    assert code == 0
    assert [row["method"] for row in rows(text)] == ["adamw"]
    below = text.split("Not in the table:")[1]
    for run, status, error in [
        ("failed", "failed", "ValueError: gradient of 'x\\|y' is not finite at step 3"),
        ("killed", "unfinished", "no summary.json"),
        ("torn", "unreadable", ""),
        ("lacking", "unreadable", "summary.json lacks steps"),
    ]:
        (line,) = [line for line in below.splitlines() if str(tmp_path / "runs" / run) in line]
        assert f"| {status} " in line and error in line
    table = pd.read_csv(out / "table.csv")
    assert sorted(table["status"]) == ["done", "failed", "unfinished", "unreadable", "unreadable"]
    assert table.loc[table["run"].str.endswith("failed"), "error"].item() == trace


def test_nothing_done_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"status": "failed", "error": "RuntimeError: out of luck"}
    make_run(tmp_path / "runs" / "a", summary=failed)
    code, _ = run_report(tmp_path / "runs")
    assert code == 1 and "RuntimeError: out of luck" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "absent"):
        code, _ = run_report(tmp_path / folder)
        assert code == 1 and folder in capsys.readouterr().err


def test_dry_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs" / "a")
    dry = make_run(tmp_path / "runs" / "dry", "tsr", config={"dry_run": True})
    summary = json.loads((dry / "summary.json").read_text())
    kept = {key: value for key, value in summary.items() if key != "data" and not key.startswith("eval/")}
    (dry / "summary.json").write_text(json.dumps(kept))
    code, _ = run_report(tmp_path / "runs")
    error = capsys.readouterr().err
    assert code == 1 and "dry run" in error and str(dry) in error
    assert read_runs([dry])["status"].item() == "done"


def test_only_run_directories_are_found(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sweep" / "0")
    for folder in (run / ".hydra", run / "wandb" / "files", tmp_path / "sweep" / ".hydra"):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("a: 1")
    assert find_runs([tmp_path]) == [run]


def test_lines_of_one_step_become_one_row(tmp_path: Path) -> None:
    curves = read_curves(read_runs([make_run(tmp_path / "a")]))
    assert list(curves["step"]) == list(range(1, STEPS + 1))
    evaluated = curves.dropna(subset="eval/loss")
    assert list(evaluated["comm/total_bytes"]) == [step * 8_000_000 for step in (10, 20, 30, 40)]


@pytest.mark.parametrize("damage", ["missing", "empty", "torn", "eval/loss", "train/loss", "comm/total_bytes"])
def test_a_missing_curve_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    file = make_run(tmp_path / "runs" / "a") / "metrics.jsonl"
    text = file.read_text()
    if damage == "missing":
        file.unlink()
    elif damage == "empty":
        file.write_text("")
    elif damage == "torn":
        file.write_text(text[:-10])
    else:
        file.write_text(text.replace(damage, "other"))
    code, out = run_report(tmp_path / "runs")
    assert code == 1 and not (out / "table.md").exists()
    assert str(file) in capsys.readouterr().err


# Where the report goes, and where runs come from.


@pytest.mark.usefixtures("no_figure")
def test_the_table_goes_into_a_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs" / "a")
    readme = tmp_path / "README.md"
    around = ("# Title\n<!-- begin proxy -->", "<!-- end proxy -->\nRest\n<!-- begin other -->\n<!-- end other -->\n")
    readme.write_text("old".join(around))
    for _ in range(2):  # what is there is replaced
        code, out = run_report(tmp_path / "runs", "--readme", str(readme), "proxy")
        assert code == 0
        assert readme.read_text() == f"{around[0]}\n\n{(out / 'table.md').read_text()}\n{around[1]}"
    for damaged in ("", "<!-- begin proxy -->", "<!-- end proxy --> <!-- begin proxy -->", "old".join(around) * 2):
        readme.write_text(damaged)
        code, _ = run_report(tmp_path / "runs", "--readme", str(readme), "proxy")
        assert code == 1 and readme.read_text() == damaged
        assert "<!-- begin proxy -->" in capsys.readouterr().err
    code, _ = run_report(tmp_path / "runs", "--readme", str(tmp_path / "absent.md"), "proxy")
    assert code == 1 and not (tmp_path / "absent.md").exists()


def test_a_csv_of_results_does_as_well(tmp_path: Path) -> None:
    for method in ("adamw", "tsr"):
        for seed in (0, 1):
            run = make_run(tmp_path / "runs" / f"{method}{seed}", method, seed=seed, loss=4 + seed / 10)
            Results(str(tmp_path / "results.csv")).add(run)
    done = with_ratios(comparable(read_runs(find_runs([tmp_path / "runs"])), allow_mixed=False))
    table = table_of(done, missing_seeds(done, done))
    out = tmp_path / "report"
    assert main([str(tmp_path / "results.csv"), "--out", str(out)]) == 0
    assert (out / "table.md").read_text() == table.markdown() and len(table.rows) == 2
    assert (out / "table.tex").read_text() == table.latex()
    pictures = [file.name for file in out.glob("*.png")]
    assert "loss_vs_bytes_per_step.png" in pictures and "loss_vs_bytes.png" not in pictures  # which needs curves
    assert (out / "report.html").read_text().count("<img") == len(pictures)


def test_a_place_where_no_report_can_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs")
    (tmp_path / "report").write_text("a file")
    assert run_report(tmp_path / "runs")[0] == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and str(tmp_path / "report") in error and len(error.splitlines()) == 1
