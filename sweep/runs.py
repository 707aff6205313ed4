"""Read runs: `find_runs` → `read_runs` → `read_curves`. Nothing here judges, formats or draws.

Runs come from their directories, or from a CSV of results (`sweep.results`), whose rows are the same but have no curve.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

METHOD_ORDER = ("adamw", "galore", "one_sided", "tsr", "tsr_paper", "tsr_svd")

RUN_FILES = {"config.yaml", "metrics.jsonl", "summary.json"}

# What summary.json of every finished run holds; a dry run lacks the losses.
MEASURES = (
    "steps",
    "tokens",
    "world_size",
    "comm/bytes_per_step",
    "comm/peak_bytes",
    "comm/total_bytes",
    "paper/comm/bytes_per_step",
    "paper/comm/peak_bytes",
    "paper/comm/total_bytes",
    "memory/optimizer_state_bytes",
    "memory/weight_bytes",
    "paper/memory_bytes",
    "duration_s",
)
LOSSES = ("eval/loss", "eval/perplexity")
# Of a fine-tuning; its metrics follow, each as eval/NAME. A pretraining has none, and a CSV without any has no column.
TASK = "task"
SCORE, METRIC, SPLIT = "eval/score", "eval/metric", "eval/split"
SCORES = (TASK, SPLIT, "eval/examples", METRIC, SCORE)
EPOCHS = "config/trainer.epochs"
PROVENANCE = ("config_hash", "git_commit")
DATA_HASHES = ("corpus_sha256", "tokenizer_sha256")
KINDS = ("embedding", "linear", "head", "vector")  # of blocks; others, if any, follow
KIND_BYTES = "comm/bytes_per_step/"  # and a kind: its part of comm/bytes_per_step

# The order of the columns that every table of runs has; the `config/…` columns follow them.
COLUMNS = (
    *("run", "status", "error", "method", "model", "settings", "lr", "seed", "data_seed", "dry_run"),
    *(*LOSSES, *MEASURES, *(KIND_BYTES + kind for kind in KINDS), *DATA_HASHES, *PROVENANCE, "machine"),
)
INTEGERS = ("seed", "data_seed", *(key for key in MEASURES if not key.endswith(("bytes_per_step", "duration_s"))))


def find_runs(roots: Iterable[Path]) -> list[Path]:
    """Every run directory in or below `roots`, once, sorted within each root; a CSV of results stands for itself.

    Raises:
        ValueError: a root is no folder or CSV, or holds no run.
    """
    found: dict[Path, Path] = {}
    for root in roots:
        runs = [root] if is_results(root) and root.is_file() else list(_walk(root))
        if not runs:
            what = "holds no run directory" if root.is_dir() else "is no folder and no CSV of results"
            raise ValueError(
                f"RUNS_DIR: '{root}' {what}; give a run directory, a folder that holds some, or such a CSV"
            )
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def is_results(path: Path) -> bool:
    """Whether `path` names a CSV of results rather than a run directory."""
    return path.suffix == ".csv"


def _walk(root: Path) -> Iterator[Path]:
    for folder, children, files in os.walk(root):
        if RUN_FILES.intersection(files):
            children.clear()  # W&B writes a config.yaml of its own further down
            yield Path(folder)
        children[:] = sorted(child for child in children if not child.startswith("."))  # Hydra's .hydra has one, too


def read_runs(paths: Iterable[Path]) -> pd.DataFrame:
    """One row a run, by method (`METHOD_ORDER`, then alphabetical), model, learning rate, settings and seed.

    `status` is `done` or `failed` as the run says, `unfinished` without a summary.json, and `unreadable` when a file
    is damaged or lacks a key; `error` tells why a run is not done. `settings` names the configuration in which the runs
    of one method, model and task differ besides their seeds, e.g. `rank.linear=16`; it is empty where they do not.
    The columns of `SCORES` are there in any case, and one for each metric that a run names.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for path in paths:
        rows += read_results(path) if is_results(path) else [read_run(path)]
    runs = pd.DataFrame(rows)
    named = {f"eval/{metric}" for metric in runs.get(METRIC, pd.Series(dtype=object)).dropna()}
    first = (*COLUMNS, *SCORES)
    runs = runs.reindex(columns=[*first, *sorted((set(runs) | named) - set(first))])
    runs = runs.astype(dict.fromkeys(INTEGERS, "Int64"))
    runs["settings"] = _settings(runs)
    order = sorted(range(len(runs)), key=lambda index: _rank(runs.iloc[index]))
    return runs.iloc[order].reset_index(drop=True)


def read_results(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV of results.

    Raises:
        ValueError: the file is no such CSV, or has no row.
    """
    import pandas as pd

    try:
        runs = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no CSV of results ({error})") from error
    missing = [column for column in ("run", "status", "method", "model", "config_hash") if column not in runs]
    if missing or runs.empty:
        raise ValueError(f"{path}: no CSV of results: {'it has no row' if runs.empty else f'{missing[0]} is missing'}")
    if TASK not in runs and "config/data.task" in runs:
        runs[TASK] = runs["config/data.task"]
    return [{str(key): value for key, value in row.items()} for row in runs.to_dict("records")]


def read_run(path: Path) -> dict[str, Any]:
    """The row of one run; never raises for what is wrong inside the directory, but records it (see `read_runs`)."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    row: dict[str, Any] = {"run": str(path)}
    try:
        config = dict(_flatten(OmegaConf.to_container(OmegaConf.load(path / "config.yaml"), resolve=True)))
        row |= {f"config/{key}": value for key, value in config.items()}
        row |= {"method": config.get("optimizer.name"), "model": config.get("model.name")}
        row |= {"lr": config.get("optimizer.lr"), "dry_run": bool(config.get("dry_run"))}
        row |= {"seed": config.get("seed"), "data_seed": config.get("data_seed"), TASK: config.get("data.task")}
        if row["method"] is None or row["model"] is None:
            raise ValueError("config.yaml lacks optimizer.name or model.name")
        if not (path / "summary.json").exists():
            return row | {"status": "unfinished", "error": "no summary.json: still running, or killed"}
        return row | _read_summary(path / "summary.json", dry_run=row["dry_run"])
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        return row | {"status": "unreadable", "error": str(error)}


def _read_summary(path: Path, *, dry_run: bool) -> dict[str, Any]:
    summary = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(summary, dict):
        raise ValueError("summary.json is not an object")
    required = ("status", *MEASURES, *PROVENANCE, *(() if dry_run else LOSSES))
    missing = [key for key in required if key not in summary]
    if missing and summary.get("status") in ("done", None):
        raise ValueError(f"summary.json lacks {', '.join(missing)}")
    row = {key: summary.get(key) for key in ("status", *LOSSES, *MEASURES, *PROVENANCE)}
    if METRIC in summary:
        row |= {key: value for key, value in summary.items() if key.startswith("eval/") and key != "eval/tokens"}
    data = summary.get("data") or {}
    row |= {key: data.get(key) for key in DATA_HASHES}
    for split in (summary.get("comm/by_role") or {}).values():
        for kind, count in split.items():
            row[KIND_BYTES + kind] = row.get(KIND_BYTES + kind, 0) + count / summary["steps"]
    row["machine"] = summary.get("machine")
    return row if row["status"] == "done" else row | {"error": str(summary.get("error") or "none recorded")}


def read_curves(runs: pd.DataFrame) -> pd.DataFrame:
    """The metrics.jsonl of every run in `runs`: one row a run and step, with the column `run` to join on.

    Raises:
        ValueError: a metrics.jsonl is missing, empty or damaged.
    """
    import pandas as pd

    return pd.concat([read_curve(Path(run)).assign(run=run) for run in runs["run"]], ignore_index=True)


def read_curve(path: Path) -> pd.DataFrame:
    """The metrics.jsonl of the run in `path`, one row a step: lines of the same step are merged.

    Raises:
        ValueError: the file is missing, empty or damaged.
    """
    import pandas as pd

    file = path / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{file}: missing, so this run has no curve")
    lines = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{file}:{number}: not JSON ({error})") from error
    if not lines:
        raise ValueError(f"{file}: empty, so this run has no curve")
    return pd.DataFrame(lines).groupby("step", as_index=False).first()


def metrics(runs: pd.DataFrame) -> list[str]:
    """The metrics that `runs` have, those that tables show first: of each, `eval/NAME` is a column."""
    shown = list(dict.fromkeys(runs[METRIC].dropna()))
    others = {
        column.removeprefix("eval/") for column in runs if column.startswith("eval/") and runs[column].notna().any()
    }
    facts = {key.removeprefix("eval/") for key in (*LOSSES, *SCORES)}
    return [*shown, *sorted(others - facts - set(shown))]


def is_setting(column: str) -> bool:
    """Whether a column tells what was computed, besides the seeds: in these the runs of one group agree.

    Not how a job was watched, resumed, stored, and its workers started (what counts there is the world size), nor what
    stood in the lookup tables of an experiment.
    """
    from tsr.harness.settings import GROUPS, NOT_IDENTITY

    if not column.startswith("config/"):
        return False
    group, *key = column.removeprefix("config/").split(".")
    return group in GROUPS and NOT_IDENTITY.isdisjoint({group, ".".join((group, *key[:1]))})


def varying(runs: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """Those of `columns` that hold more than one value in `runs`; missing counts as a value."""
    return [column for column in columns if runs[column].nunique(dropna=False) > 1]


def describe(runs: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """For each run, `columns` and their values as `key=value, …`: a name in terms of what sets runs apart."""
    columns = list(columns)
    names = [column.removeprefix("config/") for column in columns]
    return [
        ", ".join(f"{name}={_text(value)}" for name, value in zip(names, row, strict=True))
        for row in runs[columns].to_numpy(dtype=object)
    ]


def _text(value: Any) -> str:
    import pandas as pd

    if pd.isna(value):
        return "null"
    if isinstance(value, float):
        return f"{value:g}"
    hashed = re.fullmatch("([0-9a-f]{8})(?:[0-9a-f]{32}|[0-9a-f]{56})(-dirty)?", str(value))
    return "".join(hashed.groups("")) if hashed else str(value)


def _settings(runs: pd.DataFrame) -> pd.Series:
    columns = [column for column in runs if is_setting(column)]
    settings = runs["settings"].astype(object)
    for _, group in runs.groupby(["method", "model", TASK], dropna=False):
        # A run that never finished has no world size; that must not make the others look different.
        sizes = varying(group.dropna(subset="world_size"), ["world_size"])
        settings.loc[group.index] = describe(group, [*varying(group, columns), *sizes])
    return settings


def _rank(run: pd.Series) -> tuple[Any, ...]:
    method = str(run["method"])
    known = METHOD_ORDER.index(method) if method in METHOD_ORDER else len(METHOD_ORDER)
    numbers_in_order = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", run["settings"])]
    return known, method, str(run["model"]), _number(run["lr"]), numbers_in_order, _number(run["seed"]), run["run"]


def _number(value: Any) -> float:
    import pandas as pd

    return float("inf") if pd.isna(value) else float(value)


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and scalar values; a list becomes its JSON text, so that it can be compared."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(tree) if isinstance(tree, list) else tree
