"""Made-up run directories, of which every number is known beforehand, and reports on them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data.glue import TASKS
from sweep import report

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
            row = {"step": step, "tokens": step * TOKENS, "train/loss": loss + 3 / step, "time/step_s": 0.25}
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
        "comm/by_role": {
            "core": {"linear": STEPS * step_bytes // 2, "embedding": STEPS * step_bytes // 4},
            "dense": {"head": STEPS * step_bytes // 4, "vector": 0},
        },
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


def rows(markdown: str) -> list[dict[str, str]]:
    """The first table of a markdown text, a dictionary for each row."""
    lines = [line for line in markdown.split("\n\n")[1].splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, line, strict=True)) for line in body]


def run_report(runs: Path, *options: str) -> tuple[int, Path]:
    out = runs.parent / "report"
    return report.main([str(runs), "--out", str(out), *options]), out


SHOWN = {"mrpc": "f1", "stsb": "pearson", "cola": "matthews", "mnli": "accuracy_matched"}
OTHER = {"mrpc": "accuracy", "stsb": "spearman", "mnli": "accuracy_mismatched"}
TASK_DATA = {task: f"{index}" * 64 for index, task in enumerate(TASKS)}  # their hashes
MRPC_SCORES = {"adamw": (0.80, 0.82, 0.84), "tsr": (0.70, 0.71, 0.75)}  # by seed


def tuned(
    path: Path,
    method: str = "adamw",
    task: str = "mrpc",
    *,
    score: float | None = 0.8,
    config: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A fine-tuning run; its second metric, if the task has one, is a hundredth below its score."""
    metric = SHOWN.get(task, "accuracy")
    scores: dict[str, Any] = {f"eval/{metric}": score}
    if task in OTHER:
        scores[f"eval/{OTHER[task]}"] = None if score is None else score - 0.01
    scores |= {
        "eval/tokens": 9_000,
        "eval/metric": metric,
        "eval/score": score,
        "eval/split": "validation",
        "eval/examples": 400,
    }
    data = {"corpus_sha256": TASK_DATA[task], "tokenizer_sha256": "b" * 64}
    facts = {"data": data, "config_hash": path.name}
    settings = {"model.name": "minilm", "data.task": task, "trainer.epochs": 2, **(config or {})}
    return make_run(path, method, config=settings, summary=facts | scores | dict(summary or {}), **more)


def tuned_on_two_tasks(folder: Path) -> Path:
    """MRPC with three seeds of two methods; STS-B with two of adamw and of a method that no module names."""
    for seed in range(3):
        tuned(folder / f"m_adamw{seed}", score=MRPC_SCORES["adamw"][seed], seed=seed)
        path = folder / f"m_tsr{seed}"
        tuned(path, "tsr", score=MRPC_SCORES["tsr"][seed], seed=seed, step_bytes=2_000_000, loss=3.5)
    for seed in range(2):
        tuned(folder / f"s_adamw{seed}", task="stsb", score=0.5, seed=seed)
        tuned(folder / f"s_beta{seed}", "beta", "stsb", score=0.6 + seed / 10, seed=seed)
    return folder
