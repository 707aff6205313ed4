"""The report on small, made-up run directories: every number in it is known beforehand."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from sweep.figures import STYLES, method_style
from sweep.report import main
from sweep.runs import find_runs, read_curves, read_runs

STEPS = 40
TOKENS = 1_000  # per step


def make_run(
    path: Path,
    method: str = "adamw",
    *,
    loss: float = 4.0,
    step_bytes: int = 8_000_000,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
) -> Path:
    """A finished run; `config` (dotted keys) and `summary` override single values."""
    path.mkdir(parents=True)
    tree = {
        "optimizer": {"name": method, "lr": 0.01},
        "model": {"name": "llama_tiny", "vocab_size": 64},
        "trainer": {"steps": STEPS},
        "data": {"paths": ["a.txt", "b.txt"]},
        "seed": seed,
        "data_seed": 0,
        "dry_run": False,
    }
    composed = OmegaConf.create(tree)
    for key, value in (config or {}).items():
        OmegaConf.update(composed, key, value)
    OmegaConf.save(composed, path / "config.yaml")

    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            row = {"step": step, "tokens": step * TOKENS, "train/loss": loss + 3 / step}
            file.write(json.dumps({**row, "comm/bytes": step_bytes, "comm/total_bytes": step * step_bytes}) + "\n")
            if step % 10 == 0:  # a line of its own, to be merged with that of the step
                file.write(json.dumps({"step": step, "eval/loss": loss + 2 / step - 2 / STEPS}) + "\n")
    counted = {"bytes_per_step": float(step_bytes), "peak_bytes": 2 * step_bytes, "total_bytes": STEPS * step_bytes}
    measured = {
        "status": "done",
        "steps": STEPS,
        "tokens": STEPS * TOKENS,
        "world_size": 2,
        "eval/loss": loss,
        "eval/perplexity": math.exp(loss),
        **{f"comm/{key}": value for key, value in counted.items()},
        **{f"paper/comm/{key}": value / 2 for key, value in counted.items()},
        "memory/optimizer_state_bytes": 1_234_567,
        "memory/weight_bytes": 1,
        "paper/memory_bytes": 1,
        "git_commit": "c0ffee",
        "config_hash": f"{method}{seed}",
        "duration_s": 12.0,
        "data": {"corpus_sha256": "a" * 64, "tokenizer_sha256": "b" * 64},
    }
    (path / "summary.json").write_text(json.dumps({**measured, **(summary or {})}))
    return path


@pytest.fixture
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the tables alone: drawing takes most of the time of a report."""
    monkeypatch.setattr("sweep.report.draw_loss", lambda *_, **__: [])


def rows(markdown: str) -> list[dict[str, str]]:
    """The first table of a markdown text, a dictionary for each row."""
    lines = [line for line in markdown.split("\n\n")[1].splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, line, strict=True)) for line in body]


def run_report(runs: Path, *options: str) -> tuple[int, Path]:
    out = runs.parent / "report"
    return main([str(runs), "--out", str(out), *options]), out


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
    assert (adamw["method"], adamw["n"], adamw["eval loss"]) == ("adamw", "1", "4.000")
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
        "rank.linear=8, world_size=4": ("1", "4.000"),
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


def has_colour(image: np.ndarray, colour: str) -> bool:
    distance = np.abs(image[..., :3] - np.array(matplotlib.colors.to_rgb(colour))).max(axis=-1)
    return int((distance < 0.02).sum()) > 50


def test_the_figure_shows_every_method_in_its_colour(tmp_path: Path) -> None:
    for index, method in enumerate(["beta", "tsr", "adamw"]):  # beta: known to nobody
        make_run(tmp_path / "runs" / method, method, loss=4 + index / 5, step_bytes=8_000_000 // 4**index)
    code, out = run_report(tmp_path / "runs")
    assert code == 0
    assert [row["method"] for row in rows((out / "table.md").read_text())] == ["adamw", "tsr", "beta"]
    image = matplotlib.image.imread(out / "loss_vs_bytes.png")
    assert 900 <= image.shape[1] <= 1100  # 3.3 inches at 300 dots an inch
    for method in ("adamw", "tsr", "beta"):
        assert has_colour(image, method_style(method)[0]), method
    assert not has_colour(image, method_style("galore")[0])
    assert (out / "loss_vs_bytes.pdf").read_bytes().startswith(b"%PDF")

    _, out = run_report(tmp_path / "runs", "--figure-x", "tokens")
    half = matplotlib.image.imread(out / "loss_vs_tokens.png")
    assert half.shape[0] < image.shape[0]


def test_colours_differ_between_known_methods() -> None:
    assert len({colour for colour, _ in STYLES.values()}) == len(STYLES)
    assert len({method_style(f"method{index}") for index in range(40)}) > 20
