"""Reports on fine-tuning runs, from made-up run directories: every number in them is known beforehand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from data.glue import TASKS
from sweep import glue
from sweep.compare import best, comparable
from sweep.glue import by_task, main
from sweep.results import Results
from sweep.runs import find_runs, read_runs
from sweep.tables import Table
from tests.made_up import (
    MRPC_SCORES,
    make_run,
    rows,
    tuned,
    tuned_on_two_tasks,
)

COUNTED = {"adamw": 494.15e6, "one_sided": 157.88e6, "galore": 494.15e6, "tsr": 20.25e6}


def count(*job: str) -> dict[str, Any]:
    """A dry run in no time: bytes that round to the printed ones, and sketches of TSR's with the scripts' p alone."""
    (optimizer,) = [text.removeprefix("optimizer=") for text in job if text.startswith("optimizer=")]
    assert "experiment=table4" in job
    sketches = optimizer == "tsr"
    sent = COUNTED[optimizer] + (0.02e6 if sketches and "refresh.oversampling=0" not in job else 0)
    roles: dict[str, Any] = {"sketch": {}} if sketches else {}
    return {"paper/comm/bytes_per_step": sent, "comm/bytes_per_step": sent, "comm/by_role": roles, "blocks": []}


@pytest.fixture(autouse=True)
def no_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glue, "counter", lambda: count)


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of tables alone: without curves nothing is drawn."""
    monkeypatch.setattr(glue, "is_results", lambda _: True)


def run_glue(runs: Path, *options: str) -> tuple[int, Path]:
    out = runs.parent / "report"
    return main([str(runs), "--out", str(out), *options]), out


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """What is on stderr, which is one line."""
    error = capsys.readouterr().err
    assert error.startswith("error: ") and len(error.splitlines()) == 1
    return error


def second_table(text: str) -> list[dict[str, str]]:
    return rows("\n\n" + text[text.index("| paper ") :])


def beside(folder: Path, *, median: bool = False) -> tuple[list[dict[str, str]], Table]:
    runs = read_runs(find_runs([folder]))
    tasks = by_task(runs, only_best=False, allow_edge=False, median=median)
    table = glue.beside_printed(tasks, count, median=median)
    return rows("\n\n" + table.markdown()[table.markdown().index("| ") :]), table


@pytest.fixture
def two_tasks(tmp_path: Path) -> Path:
    return tuned_on_two_tasks(tmp_path / "runs")


def test_two_tasks_in_one_table(two_tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_glue(two_tasks)
    assert code == 0
    text = (out / "glue.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    stsb_adamw, stsb_beta, adamw, tsr = rows(text)
    assert [(row["task"], row["metric"], row["method"]) for row in rows(text)] == [
        ("stsb", "pearson", "adamw"),
        ("stsb", "pearson", "beta"),
        ("mrpc", "f1", "adamw"),
        ("mrpc", "f1", "tsr"),
    ]
    deviation = {method: 100 * statistics.stdev(scores) for method, scores in MRPC_SCORES.items()}
    assert adamw["score (×100)"] == "**82.00 ± 2.00**"
    assert tsr["score (×100)"] == f"72.00 ± {deviation['tsr']:.2f}"
    error = math.sqrt(sum(value**2 for value in deviation.values()) / 3)
    assert (adamw["gap to adamw (points)"], tsr["gap to adamw (points)"]) == ("-", f"−10.00 ± {error:.2f}")
    assert tsr["other metrics"] == f"accuracy 71.00 ± {deviation['tsr']:.2f}"
    assert stsb_adamw["other metrics"] == "spearman 49.00"
    assert (stsb_adamw["score (×100)"], stsb_beta["score (×100)"]) == ("50.00", "**65.00 ± 7.07**")
    assert stsb_beta["gap to adamw (points)"] == "+15.00 ± 5.00"
    assert (tsr["n"], tsr["lr"], tsr["eval loss"], tsr["epochs"]) == ("3", "0.01", "3.500", "2")
    assert (tsr["bytes/step (MB)"], tsr["÷ adamw"]) == ("2.000", "0.250")
    assert (tsr["bytes/step, paper (MB)"], tsr["÷ adamw, paper"]) == ("1.000", "0.250")
    assert "settings" not in tsr
    assert "Scores are of the validation split; data: stsb corpus_sha256=11111111; mrpc corpus_sha256=22222222." in text

    assert {file.name for file in out.iterdir()} == {
        *(f"glue.{kind}" for kind in ("md", "csv", "tex", "html")),
        *("loss_vs_bytes.png", "loss_vs_bytes.pdf"),
    }
    table = pd.read_csv(out / "glue.csv")
    assert len(table) == 10
    assert list(zip(table["task"], table["eval/metric"], strict=True)).count(("stsb", "pearson")) == 4
    assert set(table["eval/split"]) == {"validation"} and table["eval/metric"].notna().all()
    assert sorted(table.loc[table["task"] == "mrpc", "eval/f1"]) == sorted([*MRPC_SCORES["adamw"], *MRPC_SCORES["tsr"]])
    assert table["eval/spearman"].notna().sum() == 4 and set(table["config/trainer.epochs"]) == {2}
    page = (out / "glue.html").read_text()
    assert page.count("<table") == 2 and page.count("<img") == 1
    latex = (out / "glue.tex").read_text()
    assert latex.count(r"\begin{table}") == 2 and "pearson" in latex


# The best setting, seeds.


def grid(folder: Path, method: str, scores: Mapping[float, float | None], *, losses: Mapping[float, float]) -> None:
    for lr, score in scores.items():
        tuned(folder / f"{method}{lr}", method, score=score, loss=losses[lr], config={"optimizer.lr": lr})


@pytest.mark.parametrize(
    ("scores", "losses", "chosen"),
    [
        ({1.0: 0.7, 2.0: 0.8, 3.0: 0.75}, {1.0: 1.0, 2.0: 2.0, 3.0: 3.0}, 2.0),  # the loss says 1
        ({1.0: 0.8, 2.0: 0.8, 3.0: 0.8}, {1.0: 2.0, 2.0: 1.0, 3.0: 2.0}, 2.0),  # of equal ones the lowest loss
        ({1.0: None, 2.0: -0.1, 3.0: None}, {1.0: 1.0, 2.0: 2.0, 3.0: 1.0}, 2.0),  # undefined is never better
        ({1.0: None, 2.0: None, 3.0: None}, {1.0: 3.0, 2.0: 2.0, 3.0: 3.0}, 2.0),
        ({1.0: -0.3, 2.0: -0.2, 3.0: -0.25}, {1.0: 1.0, 2.0: 1.0, 3.0: 1.0}, 2.0),
    ],
)
def test_best_is_the_highest_score(
    tmp_path: Path, scores: Mapping[float, float | None], losses: Mapping[float, float], chosen: float
) -> None:
    grid(tmp_path, "tsr", scores, losses=losses)
    done = comparable(read_runs(find_runs([tmp_path])), allow_mixed=False)
    assert list(best(done)["lr"]) == [chosen]


@pytest.mark.usefixtures("no_curves")
def test_best_of_each_task_and_method_with_what_it_was_chosen_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {1.0: 1.0, 2.0: 2.0, 3.0: 3.0}
    grid(tmp_path / "runs" / "a", "adamw", {1.0: 0.7, 2.0: 0.8, 3.0: 0.75}, losses=losses)
    for lr in losses:
        tuned(tmp_path / "runs" / f"s{lr}", task="stsb", score=0.5 + (lr == 2) / 10, config={"optimizer.lr": lr})
    tuned(tmp_path / "runs" / "seed", seed=1, score=0.7, config={"optimizer.lr": 2.0})
    code, out = run_glue(tmp_path / "runs", "--best")
    text = (out / "glue.md").read_text()
    assert code == 0
    assert [(row["task"], row["n"], row["lr"]) for row in rows(text)] == [("stsb", "1", "2"), ("mrpc", "2", "2")]
    choice = "adamw: chosen from optimizer.lr ∈ {1, 2, 3}, 3 settings, by the"
    equal = "(of equal ones, the evaluation loss)"
    assert f"\nmrpc, {choice} f1 {equal} of seed 0, which is in the mean, too.\n" in text
    assert f"\nstsb, {choice} pearson {equal} of seed 0, which is in the mean, too.\n" in text
    assert len(pd.read_csv(out / "glue.csv")) == 3

    grid(tmp_path / "runs" / "b", "tsr", {1.0: 0.9, 2.0: 0.8, 3.0: 0.75}, losses=losses)
    capsys.readouterr()
    assert run_glue(tmp_path / "runs", "--best")[0] == 1
    error = error_of(capsys)
    assert "mrpc: --best: the highest score is at the edge" in error and "a higher one may lie beyond" in error
    assert "tsr: optimizer.lr=1 is at the edge of {1, 2, 3}" in error
    assert run_glue(tmp_path / "runs", "--best", "--allow-edge", "--median")[0] == 0
    text = (out / "glue.md").read_text()
    assert [row["lr"] for row in rows(text)] == ["2", "2", "1"]
    assert "which is in the median, too" in text and "in the mean" not in text


@pytest.mark.usefixtures("no_curves")
def test_a_missing_seed_is_named_and_its_row_is_not_bold(tmp_path: Path) -> None:
    for seed in range(3):
        tuned(tmp_path / "runs" / f"adamw{seed}", seed=seed, score=0.5 + seed / 100)
        tuned(tmp_path / "runs" / f"other{seed}", task="stsb", seed=seed + 4)  # seeds of another task are not missing
    for seed in range(2):
        tuned(tmp_path / "runs" / f"tsr{seed}", "tsr", seed=seed, score=0.9 + seed / 100)
    failed = {"status": "failed", "error": "Traceback …\nNonFiniteGradient: step 3"}
    tuned(tmp_path / "runs" / "tsr2", "tsr", seed=2, summary=failed)
    (tuned(tmp_path / "runs" / "adamw3", seed=3) / "summary.json").unlink()
    (tuned(tmp_path / "runs" / "cola", task="cola") / "summary.json").unlink()
    code, out = run_glue(tmp_path / "runs")
    text = (out / "glue.md").read_text()
    assert code == 0
    assert [(row["task"], row["n"]) for row in rows(text)] == [("stsb", "3"), ("mrpc", "3 of 4"), ("mrpc", "2 of 4")]
    assert "**" not in text
    assert "\nmrpc, tsr: seed 2 missing (failed: NonFiniteGradient: step 3); seed 3 missing (not run).\n" in text
    assert "\nmrpc, adamw: seed 3 missing (unfinished: no summary.json: still running, or killed).\n" in text
    above, below = text.split("Not in the table:")
    assert above.count("missing") == 3
    assert "tsr2" in below and "cola" in below
    assert sorted(pd.read_csv(out / "glue.csv")["status"].unique()) == ["done", "failed", "unfinished"]


@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize("option", [(), ("--median",)])
def test_an_undefined_score_leaves_no_mean_and_is_named(tmp_path: Path, option: tuple[str, ...]) -> None:
    for seed in range(2):
        tuned(tmp_path / "runs" / f"a{seed}", task="stsb", seed=seed, score=0.5)
        tuned(tmp_path / "runs" / f"t{seed}", "tsr", "stsb", seed=seed, score=[0.9, None][seed])
    code, out = run_glue(tmp_path / "runs", *option)
    text = (out / "glue.md").read_text()
    adamw, tsr = rows(text)
    title = "median score (×100)" if option else "score (×100)"
    assert code == 0
    assert (adamw[title], tsr[title], tsr["gap to adamw (points)"]) == ("50.00", "-", "-")
    assert tsr["other metrics"] == "spearman -" and tsr["n"] == "2"
    assert "\nstsb, tsr: pearson is undefined (seed=1).\n" in text
    assert {row["here"]: row["STS-B (pearson), here"] for row in second_table(text)} == {
        "adamw": "50.00",
        "one_sided": "-",
        "tsr": "-",
    }


@pytest.mark.usefixtures("no_curves")
def test_a_score_undefined_in_every_run_of_a_csv(tmp_path: Path) -> None:
    for seed in range(2):
        Results(str(tmp_path / "runs.csv")).add(tuned(tmp_path / str(seed), task="stsb", seed=seed, score=None))
    code, out = run_glue(tmp_path / "runs.csv")
    assert code == 0
    (row,) = rows((out / "glue.md").read_text())
    assert (row["metric"], row["score (×100)"], row["n"]) == ("pearson", "-", "2")


@pytest.mark.usefixtures("no_curves")
def test_the_median_and_the_range(tmp_path: Path) -> None:
    scores = {"adamw": (0.5, 0.6, 0.61), "tsr": (0.62, 0.9, 0.63), "beta": (0.1, 0.2, 0.9)}
    for method, values in scores.items():
        for seed, score in enumerate(values[: 3 if method != "beta" else 2]):
            tuned(tmp_path / "runs" / f"{method}{seed}", method, score=score, seed=seed, loss=2.0 + seed**2)
    code, out = run_glue(tmp_path / "runs", "--median")
    text = (out / "glue.md").read_text()
    assert code == 0
    adamw, tsr, beta = rows(text)
    assert (adamw["median score (×100)"], adamw["range (×100)"], adamw["n"]) == ("60.00", "50.00–61.00", "3")
    assert (tsr["median score (×100)"], tsr["range (×100)"]) == ("**63.00**", "62.00–90.00")
    assert (beta["median score (×100)"], beta["gap to adamw (points)"]) == ("15.00", "−45.00")
    assert tsr["gap to adamw (points)"] == "+3.00" and tsr["other metrics"] == "accuracy 62.00"
    assert tsr["median eval loss"] == "3.000"
    assert "±" not in text.split("\n\n")[1]
    assert {row["here"]: row["MRPC (f1), here"] for row in second_table(text)}["tsr"] == "63.00"


@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize(
    ("adamw", "tsr", "bold"),
    [
        ((0.5, 0.6), (0.6, 0.9), False),  # the ranges touch
        ((0.5, 0.6), (0.61, 0.9), True),
        ((0.5,), (0.9,), False),  # one seed has no range
        ((0.5, 0.6), (0.9,), False),
        ((0.5, 0.6, 0.55), (0.7, 0.8), False),  # a seed is missing
        ((0.5, 0.6), (0.7, 0.8, 0.75), True),  # of the other
    ],
)
def test_a_median_is_bold_where_the_ranges_are_apart(
    tmp_path: Path, adamw: tuple[float, ...], tsr: tuple[float, ...], bold: bool
) -> None:
    for method, scores in (("adamw", adamw), ("tsr", tsr)):
        for seed, score in enumerate(scores):
            tuned(tmp_path / "runs" / f"{method}{seed}", method, score=score, seed=seed)
    _, out = run_glue(tmp_path / "runs", "--median")
    first, second = rows((out / "glue.md").read_text())
    assert second["median score (×100)"].startswith("**") == bold
    assert not first["median score (×100)"].startswith("**")


# What may stand in one table.


@pytest.mark.parametrize(
    ("config", "summary", "named"),
    [
        ({"trainer.epochs": 3}, {}, "trainer.epochs=3"),
        ({}, {"tokens": 77}, "tokens=77"),
        ({}, {"data": {"corpus_sha256": "d" * 64, "tokenizer_sha256": "b" * 64}}, "corpus_sha256=dddddddd"),
        ({}, {"git_commit": "decade"}, "git_commit=decade"),
        ({}, {"eval/metric": "accuracy"}, "eval/metric=accuracy"),
        ({"model.dropout": 0.1}, {}, "model.dropout=0.1"),
    ],
)
def test_runs_of_a_task_that_do_not_compare_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    summary: dict[str, Any],
    named: str,
) -> None:
    tuned(tmp_path / "runs" / "a")
    tuned(tmp_path / "runs" / "b", "tsr", config=config, summary=summary)
    code, out = run_glue(tmp_path / "runs")
    error = error_of(capsys)
    assert code == 1 and not out.exists()
    assert error.startswith("error: mrpc: these runs do not compare: ") and named in error


@pytest.mark.usefixtures("no_curves")
def test_tasks_may_differ_in_commit_and_epochs_but_not_in_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned(tmp_path / "runs" / "a", score=0.0625)
    tuned(tmp_path / "runs" / "b", task="stsb", config={"trainer.epochs": 3}, summary={"git_commit": "decade"})
    code, out = run_glue(tmp_path / "runs")
    text = (out / "glue.md").read_text()
    assert code == 0 and [row["epochs"] for row in rows(text)] == ["3", "2"]
    assert [row["score (×100)"] for row in rows(text)] == ["80.00", "6.25"]
    assert "by different commits, the methods of each by one: stsb git_commit=decade; mrpc git_commit=c0ffee." in text
    assert text.splitlines()[0] == "model=minilm, tokenizer_sha256=bbbbbbbb"
    capsys.readouterr()
    tuned(tmp_path / "runs" / "c", task="cola", config={"model.name": "roberta_base"})
    assert run_glue(tmp_path / "runs")[0] == 1
    error = error_of(capsys)
    assert "several models" in error and str(tmp_path / "runs" / "c") in error and "minilm" in error


@pytest.mark.usefixtures("no_curves")
def test_adapters_beside_the_same_weights_compare(tmp_path: Path) -> None:
    tuned(tmp_path / "runs" / "a", config={"model.lora": None})
    tuned(tmp_path / "runs" / "l", "lora", config={"model.lora": {"rank": 8, "alpha": 16}}, step_bytes=800_000)
    code, out = run_glue(tmp_path / "runs")
    _, lora = rows((out / "glue.md").read_text())
    assert code == 0 and (lora["method"], lora["÷ adamw"]) == ("lora", "0.100")


def test_several_settings_of_a_method_are_rows_of_their_own(tmp_path: Path) -> None:
    for rank in (4, 8):
        tuned(tmp_path / f"r{rank}", "tsr", config={"rank.linear": rank, "optimizer.lr": rank / 10})
    tuned(tmp_path / "s", "tsr", "stsb", config={"rank.linear": 16})  # of another task, which sets nothing apart
    runs = read_runs(find_runs([tmp_path]))
    table = glue.score_table(by_task(runs, only_best=False, allow_edge=False, median=False), median=False)
    shown = [(row["task"], row["settings"], row["lr"]) for row in rows(table.markdown())]
    assert shown == [("stsb", "-", "0.01"), ("mrpc", "rank.linear=4", "0.4"), ("mrpc", "rank.linear=8", "0.8")]
    (*_, tsr), printed = beside(tmp_path)
    assert (tsr["here"], tsr["MRPC (f1), here"], tsr["STS-B (pearson), here"]) == ("tsr", "-", "80.00")
    assert "several settings, of which --best takes one: tsr on mrpc." in " ".join(printed.notes)


def test_what_is_no_fine_tuning_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned(tmp_path / "runs" / "a")
    pretraining = make_run(tmp_path / "runs" / "b", config={"model.name": "minilm"})
    assert run_glue(tmp_path / "runs")[0] == 1
    error = error_of(capsys)
    assert str(pretraining) in error and "no data.task" in error
    assert run_glue(tmp_path / "absent\nfolder")[0] == 1
    assert "absent folder" in error_of(capsys)
    tuned(tmp_path / "failed" / "a", summary={"status": "failed", "error": "Traceback …\nRuntimeError: out of luck"})
    assert run_glue(tmp_path / "failed")[0] == 1
    assert "none of 1 runs is done" in error_of(capsys)
    tuned(tmp_path / "dry" / "a", config={"dry_run": True})
    assert run_glue(tmp_path / "dry")[0] == 1
    assert "dry runs" in error_of(capsys)


def test_a_row_without_a_metric_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.csv"
    Results(str(path)).add(tuned(tmp_path / "a"))
    table = pd.read_csv(path)
    kept = [column for column in table if column != "task" and not column.startswith(("eval/metric", "eval/score"))]
    table[kept].to_csv(path, index=False)
    assert run_glue(path)[0] == 1
    error = error_of(capsys)
    assert error.startswith("error: mrpc: a has no eval/metric")


# The paper's table.


def test_printed_values_stand_beside_ours(two_tasks: Path) -> None:
    table, printed = beside(two_tasks)
    assert [(row["paper"], row["here"]) for row in table] == [
        ("AdamW", "adamw"),
        ("GaLore", "one_sided"),
        ("TSR", "tsr"),
        ("-", "beta"),
    ]
    adamw, one_sided, tsr, beta = table
    assert (adamw["MRPC"], adamw["MRPC (f1), here"], adamw["STS-B"]) == ("91.30", "82.00", "90.92")
    assert (adamw["n"], tsr["n"], one_sided["n"], beta["n"]) == ("2–3", "3", "-", "2")
    assert (tsr["MRPC (f1), here"], tsr["STS-B (pearson), here"], tsr["average"]) == ("72.00", "-", "85.54")
    assert (beta["STS-B"], beta["STS-B (pearson), here"], beta["average"]) == ("-", "65.00", "-")
    assert "average, here" not in adamw and "CoLA (matthews), here" not in adamw
    recomputed = [(row["bytes/step, printed (MB)"], row["recomputed (MB)"], row["recomputed, p = 5"]) for row in table]
    assert recomputed == [("494", "494.15", "-"), ("158", "157.88", "-"), ("20", "20.25", "20.27"), ("-", "-", "-")]
    assert {row["measured (MB)"] for row in table} == {"-"}
    notes = " ".join(printed.notes)
    assert "the runs are of minilm" in notes and "not run: cola, rte, sst2, mnli, qnli, qqp" in notes


def test_measured_bytes_are_of_the_paper_s_model_alone(tmp_path: Path) -> None:
    for task, sent in (("mrpc", 20_260_000), ("stsb", 20_270_000)):
        counted = {"paper/comm/bytes_per_step": sent}
        for method in ("tsr", "galore"):
            tuned(tmp_path / f"{method}{task}", method, task, config={"model.name": "roberta_base"}, summary=counted)
    table, printed = beside(tmp_path)
    measured = {row["here"]: row["measured (MB)"] for row in table}
    assert measured == {"adamw": "-", "one_sided": "-", "galore": "20.26–20.27", "tsr": "20.26–20.27"}
    second = next(row for row in table if row["here"] == "galore")
    assert (second["paper"], second["bytes/step, printed (MB)"], second["recomputed (MB)"]) == (
        "GaLore",
        "158",
        "494.15",
    )
    assert "GaLore has two readings" in " ".join(printed.notes)


def test_an_average_is_of_all_eight_tasks(tmp_path: Path) -> None:
    for index, task in enumerate(TASKS):
        tuned(tmp_path / f"a{task}", task=task, score=0.5 + index / 100)
        if task != "qqp":
            tuned(tmp_path / f"t{task}", "tsr", task)
    table, _ = beside(tmp_path)
    averages = {row["here"]: row["average, here"] for row in table}
    assert averages == {"adamw": "53.50", "one_sided": "-", "tsr": "-"}
    assert (table[0]["MNLI (accuracy_matched), here"], table[0]["SST2 (accuracy), here"]) == ("55.00", "54.00")


def test_a_csv_has_no_curve_and_gives_the_same_tables(two_tasks: Path, tmp_path: Path) -> None:
    for run in find_runs([two_tasks]):
        Results(str(tmp_path / "results.csv")).add(run)
    assert run_glue(two_tasks)[0] == 0
    expected = (tmp_path / "report" / "glue.md").read_text()
    out = tmp_path / "again"
    assert main([str(tmp_path / "results.csv"), "--out", str(out)]) == 0
    assert (out / "glue.md").read_text() == expected
    assert {file.name for file in out.iterdir()} == {f"glue.{kind}" for kind in ("md", "csv", "tex", "html")}
    assert "<img" not in (out / "glue.html").read_text()


def test_a_missing_curve_is_an_error_and_nothing_is_written(
    two_tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (two_tasks / "m_tsr1" / "metrics.jsonl").unlink()
    code, out = run_glue(two_tasks)
    assert code == 1 and "m_tsr1" in error_of(capsys) and not out.exists()


@pytest.mark.usefixtures("no_curves")
def test_the_first_table_goes_into_a_readme(two_tasks: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("A\n<!-- begin glue -->\n<!-- end glue -->\nZ\n")
    code, out = run_glue(two_tasks, "--readme", str(readme), "glue")
    text = readme.read_text()
    assert code == 0 and text.startswith("A\n<!-- begin glue -->\n\nmodel=minilm") and text.endswith("Z\n")
    assert rows(text[text.index("model=") :]) == rows((out / "glue.md").read_text()) and "Table 4" not in text
