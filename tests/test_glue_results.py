"""The committed results of fine-tuning: what they claim about themselves holds."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from sweep import glue
from sweep.compare import best, comparable
from sweep.runs import EPOCHS, find_runs, read_runs
from tests.cli import PROJECT
from tsr.harness.hydra_hooks import plain

RESULTS = PROJECT / "sweep" / "results"
TASKS = ("mrpc", "stsb")
METHODS = {"adamw", "galore", "one_sided", "tsr"}
RATE = "config/optimizer.lr"


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return read_runs(find_runs([RESULTS / "glue.csv"]))


def chosen_of(runs: pd.DataFrame, task: str) -> pd.DataFrame:
    return best(comparable(runs[runs["task"] == task], allow_mixed=False))  # raises at an edge


@pytest.mark.parametrize("task", TASKS)
def test_each_method_is_at_the_best_of_its_grid_which_lies_inside_with_three_seeds(
    task: str, runs: pd.DataFrame
) -> None:
    of_task = runs[runs["task"] == task]
    assert set(of_task["method"]) == METHODS and (of_task[EPOCHS] == 1).all()
    for method, rows in chosen_of(runs, task).groupby("method"):
        assert set(rows["seed"]) == {0, 1, 2} and rows[RATE].nunique() == 1, method
        assert of_task[(of_task["method"] == method) & (of_task["seed"] == 0)][RATE].nunique() >= 3, method
        with initialize_config_dir(str(PROJECT / "conf"), version_base="1.3"):
            config = plain(compose("config", ["experiment=glue", f"data.task={task}", f"optimizer={method}"]))
        assert config["optimizer"]["lr"] == rows[RATE].iloc[0], method


def test_methods_of_a_task_saw_the_same_examples_from_the_same_weights(runs: pd.DataFrame) -> None:
    for task, rows in runs.groupby("task"):
        assert rows["tokens"].nunique() == rows["corpus_sha256"].nunique() == rows["steps"].nunique() == 1, task
    sent = runs[runs["seed"] == 0].groupby("method")["paper/comm/bytes_per_step"].max()
    assert sent["tsr"] < sent["one_sided"] < sent["galore"] == sent["adamw"]


def test_run_directories_are_those_of_the_rows(runs: pd.DataFrame) -> None:
    made = read_runs(find_runs([RESULTS / "glue"])).set_index("config_hash")
    chosen = pd.concat([chosen_of(runs, task) for task in TASKS]).set_index("config_hash")
    assert set(made.index) == set(chosen.index) and len(made) == 24
    for column in ("eval/loss", "eval/score", "comm/total_bytes"):
        assert (made[column] == chosen[column].loc[made.index]).all()


def test_the_table_in_the_readme_is_the_table_of_the_results(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((PROJECT / "README.md").read_text())
    arguments = [str(RESULTS / "glue.csv"), "--best", "--out", str(tmp_path), "--readme", str(readme), "glue"]
    assert glue.main(arguments) == 0
    assert readme.read_text() == (PROJECT / "README.md").read_text()
