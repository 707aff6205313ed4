"""Sweeps: every experiment composes, jobs have their own directories, done ones are skipped, failed ones do not stop
the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from tests.cli import CHECKER, PROJECT, call, contents, read_metrics, read_summary, run, tiny_job
from tests.jobs import METHODS
from train import check
from tsr.harness.hydra_hooks import plain

EXPERIMENTS = sorted(path.stem for path in (PROJECT / "conf" / "experiment").glob("*.yaml"))
ABLATIONS = sorted(path.stem for path in (PROJECT / "conf" / "ablation").glob("*.yaml"))
FOLLOWS = {"sided": {"lr_factor"}, "embedding": {"lr_factor"}}  # the proxy's factor makes updates of equal norm
PAPER_MODELS = ("llama_60m", "llama_130m", "llama_350m", "llama_1b")


def run_directories(folder: Path) -> list[Path]:
    """Sorted; Hydra's multirun.yaml lies beside them."""
    return sorted(path for path in (folder / "runs").iterdir() if path.is_dir())


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("method", METHODS)
def test_every_experiment_is_sound_with_every_optimizer(experiment: str, method: str) -> None:
    models = PAPER_MODELS if experiment.startswith(("table3", "ablation_")) else (None,)
    with initialize_config_dir(str(PROJECT / "conf"), version_base="1.3"):
        for model in models:
            overrides = [f"experiment={experiment}", f"optimizer={method}", *([f"model={model}"] if model else [])]
            config = plain(compose("config", [*overrides, "dry_run=true"]))
            assert check(config)
            assert config["optimizer"]["name"] == method
            assert config["runs_dir"] == f"runs/{experiment.removesuffix('_grid')}"


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_ablation_changes_what_it_names_and_nothing_else(ablation: str) -> None:
    with initialize_config_dir(str(PROJECT / "conf"), version_base="1.3"):
        for base, model in (("table3", "llama_60m"), ("proxy", "llama_9m")):
            overrides = [f"experiment={base}", f"model={model}", "optimizer=tsr", f"ablation={ablation}"]
            sweep = compose("config", overrides, return_hydra_config=True).hydra.sweeper.params
            ((key, values),) = sweep.items()
            jobs = [
                plain(compose("config", ["dry_run=true", *overrides, f"{key}={value}"])) for value in values.split(",")
            ]
            assert len(jobs) >= 2 and all(check(job) for job in jobs)
            group, name = key.split(".")
            assert len({job[group][name] for job in jobs}) == len(jobs)
            assert plain(compose("config", ["dry_run=true", *overrides[:3]]))[group] in [job[group] for job in jobs]
            for job in jobs:
                changed = {part for part in job if job[part] != jobs[0][part]}
                assert changed <= {group, *FOLLOWS.get(ablation, ())}, changed


def test_jobs_have_directories_of_their_own_and_are_skipped_when_done(tmp_path: Path) -> None:
    job = [*tiny_job(tmp_path), "dry_run=true", "optimizer=adamw,tsr", "seed=0,1"]
    status, text = call("-m", *job)
    runs = run_directories(tmp_path)
    assert status == 0, text
    assert len(runs) == 4 and all(read_summary(path)["status"] == "done" for path in runs)

    before = [contents(path) for path in runs]
    status, text = call("-m", *job)
    assert status == 0 and text.count("done already, skipped: ") == 4, text
    assert [contents(path) for path in runs] == before

    # a job of the sweep is the same job alone, and what changes no result changes no name
    alone = [part for part in job if "," not in part or part.startswith("data.paths")]
    status, text = call(*alone, "optimizer=tsr", "seed=1", "logger=wandb", "+logger.note=x")
    assert status == 0 and "done already, skipped: " in text, text
    status, text = call(*alone, "optimizer=tsr", "seed=1", "resume=null")
    assert status == 0 and "skipped" not in text, text
    assert run_directories(tmp_path) == runs


def test_a_refused_job_is_told_at_once_and_the_others_run(tmp_path: Path) -> None:
    status, text = call("-m", *tiny_job(tmp_path), "dry_run=true", "rank.linear=16,999,8")
    assert status == 1
    events = [line for line in text.splitlines() if line.startswith(("run directory:", "job "))]
    # Hydra repeats the first failure at the end
    assert [line.split()[0] for line in events] == ["run", "job", "run", "job"], text
    assert events[1].startswith("job 1 (") and "error: rank.linear=999 is too large" in events[1]
    assert "Traceback" not in text
    runs = run_directories(tmp_path)
    assert len(runs) == 2 and all(read_summary(path)["status"] == "done" for path in runs)


@pytest.mark.distributed
def test_every_method_leaves_a_sound_record_though_a_job_fails_in_its_worker(tmp_path: Path) -> None:
    """The first job's first update makes its weights infinite, and so its second gradient."""
    outcome = run(
        *("-m", *tiny_job(tmp_path), "seed=0", f"optimizer={','.join(METHODS)}"),
        *("+lrs={adamw:1e30}", "optimizer.lr='${oc.select:lrs.${optimizer.name},0.01}'"),
    )
    assert outcome.status == 1
    runs = run_directories(tmp_path)
    assert len(runs) == len(METHODS)
    (failed,) = [path for path in runs if "-adamw-" in path.name]
    record = read_summary(failed)
    assert record["status"] == "failed" and record["rank"] == 0
    assert record["error"].startswith("NonFiniteGradient: step 2: the gradient of ")
    assert f"error: {record['error']}; see {failed / 'train.log'}" in outcome.text
    assert len(read_metrics(failed)) == 1

    done = [path for path in runs if path != failed]
    for path in done:
        assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5, 6]
    if CHECKER.is_file():
        checked = subprocess.run([sys.executable, str(CHECKER), *map(str, done)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
