"""Bad input: one clear message and a non-zero exit status, no traceback, no worker, no record."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.cli import call, only_run, read_summary, tiny_job
from tsr.harness.rundir import RunDirectory

# Arguments, and what the message says: the key, the value and what would be right.
BAD_VALUES = [
    ("rank.linear=0", "rank.linear must be a whole number of at least 1, or null for a dense linear, got 0"),
    ("rank.linear=-1", "rank.linear must be .* got -1"),
    ("rank.linear=abc", "rank.linear must be .* got 'abc'"),
    ("rank.linear=1.5", "rank.linear must be .* got 1.5"),
    ("rank.linear=true", "rank.linear must be .* got True"),
    ("rank.linear=100000", "rank.linear=100000 is too large: .* at most 63 is possible"),
    ("rank.embedding=64", "rank.embedding=64 is too large: .* at most 63 is possible"),
    ("refresh.linear=0", "refresh.linear must be a whole number of steps, at least 1, got 0"),
    ("refresh.linear=null", "refresh.linear must be .* got None"),
    ("refresh.oversampling=1.5", "refresh.oversampling must be .* got 1.5"),
    ("refresh.power_iterations=few", "refresh.power_iterations must be .* got 'few'"),
    ("refresh.method=[a]", r"refresh.method must be one of svd, sketch, local_sketch, one_pass, got \['a'\]"),
    ("subspace.linear=low", "subspace.linear must be one of dense, one_sided, two_sided, got 'low'"),
    ("lr_factor.vector=null", "lr_factor.vector must be a positive number, got None"),
    ("optimizer.lr=fast", "optimizer.lr must be a positive number, got 'fast'"),
    ("optimizer.lr=nan", "optimizer.lr must be a positive number, got nan"),
    ("optimizer.betas=0.9", r"optimizer.betas must be two numbers in \[0, 1\), got 0.9"),
    ("optimizer.weight_decay=x", "optimizer.weight_decay must be a number of 0 or more, got 'x'"),
    ("optimizer.clip_norm=x", "optimizer.clip_norm must be a positive number, or null for no clipping, got 'x'"),
    ("comm.dtype=int8", "comm.dtype must be one of fp32, bf16, fp64, got 'int8'"),
    ("comm.dtype=[a]", r"comm.dtype must be one of fp32, bf16, fp64, got \['a'\]"),
    ("comm.bucket_mib=x", "comm.bucket_mib must be positive or null .* got 'x'"),
    ("model.dtype=int8", "model.dtype: must be one of fp32, bf16, fp64, got 'int8'"),
    ("model.hidden_size=63", "model.hidden_size: 63 is not divisible by model.num_heads, 2"),
    ("trainer.steps=0", "trainer.steps must be a whole number of at least 1 or null, got 0"),
    ("trainer.steps=abc", "trainer.steps must be a whole number of at least 1 or null, got 'abc'"),
    ("schedule.warmup=x", r"schedule.warmup .* must be in \[0, 1\), got 'x'"),
    ("schedule.floor=null", "schedule.floor must be between 0 and 1, got None"),
    ("nproc=0", "nproc must be a whole number of at least 1, got 0"),
    ("nproc=two", "nproc must be a whole number of at least 1, got 'two'"),
    ("nproc=3", "trainer.global_batch=4 is not divisible by the number of workers, 3; try 3"),
    ("seed=x", "seed must be a whole number of at least 0, got 'x'"),
    ("data_seed=-1", "data_seed must be a whole number of at least 0, got -1"),
    ("dry_run=maybe", "dry_run must be true or false, got 'maybe'"),
    ("world_size=4", "world_size=4 is for dry runs; start real workers with nproc"),
    ("dry_run=true world_size=0", "world_size must be a whole number of at least 1 or null, got 0"),
    ("device=tpu", "device must be auto, cpu or cuda, got 'tpu'"),
    ("resume=5", "resume must be auto, null or the path of a checkpoint or run, got 5"),
    ("resume=nowhere", "resume=nowhere: no checkpoint is there; give a folder"),
    ("logger.name=x", "logger must be wandb or none, got 'x'"),
    ("task.name=x", "task must be pretrain or finetune, got 'x'"),
    ("task=finetune", "trainer.steps=6 and trainer.epochs=3: give one of them, and null for the other"),
    (
        "experiment=table3 source=nonsense",
        r"refresh.linear: table3.interval has no 'nonsense'; there is paper, scripts$",
    ),
    (
        "experiment=table6 model=llama_1b",
        r"rank.linear: table6 has no 'llama_1b'; there is llama_60m, llama_130m, llama_350m$",
    ),
    ("rank.linear=${nothing.here}", "rank.linear: nothing.here has no 'nothing'; there is no such table$"),
    ("~logger", "logger must be a group of keys, got None"),
    ("data.paths=[nowhere.txt]", "data.paths: 'nowhere.txt' does not exist; give a file or folder with text"),
    ("data.paths=[]", "data.paths is empty; give files or folders"),
    ("data.paths=[5]", r"data.paths must be a list of files or folders, got \[5\]"),
    ("data.paths=corpus.txt", r"data.paths must be a list, got 'corpus.txt'; write data.paths=\[corpus.txt\]"),
    ("data.rows=x", "data.rows must be one of packed, document, got 'x'"),
    ("data.sequence_length=x", "data.sequence_length must be a whole number of at least 2, got 'x'"),
    ("data.sequence_length=2048", "data.sequence_length=2048 exceeds model.max_positions=1024"),
    ("data.validation_fraction=x", "data.validation_fraction must be between 0 and 1, got 'x'"),
    ("data.cache_dir=5", "data.cache_dir must be a text, got 5"),
    ("data.tokenizer.path=nowhere", "data.tokenizer.path: 'nowhere' is not a file; give a SentencePiece .model"),
    ("data.tokenizer.path=5", "data.tokenizer.path must be a text, got 5"),
    ("data.tokenizer.vocab_size=310", "model.vocab_size=300 but the tokenizer .* has 310 pieces; set model.vocab_size"),
    ("model.vocab_size=10", "data.tokenizer.vocab_size=10 is too small for a tokenizer .* smallest that would do is"),
    ("model.vocab_size=9999", "data.tokenizer.vocab_size=9999 is too large for this corpus; the largest .* is"),
    ("+trainer.epoch=1", "trainer: got an unexpected keyword argument 'epoch'; it takes steps, epochs, global_batch"),
    ("+comm.codec=1", "comm: got an unexpected keyword argument 'codec'; it takes dtype, bucket_mib"),
    ("+optimizer.momentum=1", "optimizer.momentum is unknown; optimizer takes lr, scale"),
    ("+rank.norm=1", "rank.norm is unknown; rank takes linear, embedding, head, vector"),
    ("+model.depth=1", "unexpected keyword argument 'depth'"),
    ("+data.url=1", "unexpected keyword argument 'url'"),
    ("+optimizer.roles={linear:['*.weights']}", "roles.linear: the rule '.*weights' selects no parameter"),
]
# Hydra's own messages, which take several lines.
UNKNOWN_NAMES = [
    ("optimizer=sgd", ["Could not find 'optimizer/sgd'", "Available options in 'optimizer'", "tsr_svd"]),
    ("model=gpt", ["Could not find 'model/gpt'", "Available options in 'model'", "llama_60m"]),
    ("trainer.epoch=1", ["Could not override 'trainer.epoch'"]),
    ("optimizer.momentum=1", ["Could not override 'optimizer.momentum'"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture
def job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A good job, in an empty folder of runs."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    monkeypatch.chdir(folder)
    return tiny_job(folder)


def assert_refused(arguments: list[str], message: str, folder: Path) -> None:
    """One line that says what is wrong, and nothing left."""
    status, text = call(*arguments)
    assert status != 0
    lines = text.splitlines()
    assert len(lines) == 1 and re.match(f"error: .*{message}", lines[0]), text
    assert not list(folder.glob("runs/*"))


@pytest.mark.parametrize(("arguments", "message"), BAD_VALUES, ids=[arguments for arguments, _ in BAD_VALUES])
def test_a_bad_value_is_refused_in_one_line(arguments: str, message: str, job: list[str], folder: Path) -> None:
    assert_refused([*job, *arguments.split()], message, folder)


@pytest.mark.parametrize(("argument", "parts"), UNKNOWN_NAMES, ids=[argument for argument, _ in UNKNOWN_NAMES])
def test_an_unknown_name_is_refused(argument: str, parts: list[str], job: list[str], folder: Path) -> None:
    status, text = call(*job, argument)
    assert status != 0
    assert all(part in text for part in parts) and "Traceback" not in text, text
    assert not list(folder.glob("runs/*"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (0, "data: no document to train a tokenizer on; the corpus is empty"),
        (40, "data=text: the .* documents are empty or do not fill one row of data.sequence_length=1000 tokens"),
    ],
    ids=["empty", "shorter than a row"],
)
def test_a_corpus_that_will_not_do_is_refused(lines: int, message: str, job: list[str], folder: Path) -> None:
    small = folder / "small.txt"
    text = (folder / "corpus.txt").read_text().splitlines(keepends=True)
    small.write_text("".join(text[:lines]))
    assert_refused([*job, f"data.paths=[{small}]", "data.sequence_length=1000"], message, folder)


def test_a_rank_that_some_blocks_can_take_is_fine(job: list[str], folder: Path) -> None:
    status, text = call(*job, "model.intermediate_size=32", "rank.linear=40", "dry_run=true")
    assert status == 0, text
    blocks = read_summary(only_run(folder / "runs"))["blocks"]
    treatment = {row["shape"]: (row["rank"], row["note"]) for row in blocks if row["role"] == "linear"}
    note = "smaller side 32 ≤ rank 40"
    assert treatment == {"64x64": (40, ""), "32x64": (None, note), "64x32": (None, note)}


def test_c4_without_a_network(job: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    paths = [part for part in job if part.startswith("data.paths=") or part == "data=text"]
    arguments = [part for part in job if part not in paths] + ["data=c4", "data.max_train_rows=24"]
    assert_refused(arguments, "data=c4: cannot read allenai/c4 .* use data=text or data=stdlib", folder)
    assert_refused([*arguments, "data.max_train_rows=null"], "data.max_train_rows=null, but C4 has", folder)


@pytest.mark.parametrize("arguments", ["hydra.run.dir=corpus.txt/run", "-m hydra.sweep.dir=corpus.txt/runs seed=0,1"])
def test_a_directory_below_a_file_is_refused(arguments: str, job: list[str], folder: Path) -> None:
    *flags, directory = arguments.split()[: 2 if arguments.startswith("-m") else 1]
    rest = arguments.split()[len(flags) + 1 :]
    key = directory.split("=")[0]
    assert_refused(
        [*flags, *job, directory, *rest], f"{key}=.*: no directory can be made there .*; give another", folder
    )


def test_a_checkpoint_that_does_not_fit_is_refused(job: list[str], folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text(
        '{"step": 2, "signature": {"other.weight": [[3, 4], "torch.float32"]}, "text": {}}'
    )
    torch.save({}, checkpoint / "state.pt")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    assert_refused([*job, f"resume={checkpoint}"], "resume=.*: the checkpoint is of another model or optimizer", folder)
    (checkpoint / "state.pt").write_bytes(b"PK\x03\x04")
    assert_refused([*job, f"resume={checkpoint}"], "resume=.*: the checkpoint is damaged .*; use an older one", folder)
    assert_refused([*job, f"resume={tmp_path / 'empty'}"], "resume=.*: this run has no checkpoint yet", folder)


def test_a_directory_of_another_configuration_is_refused(job: list[str], folder: Path) -> None:
    directory = folder / "runs" / "mine"
    assert call(*job, f"hydra.run.dir={directory}", "dry_run=true").status == 0
    before = {path: path.read_bytes() for path in directory.iterdir()}
    status, text = call(*job, f"hydra.run.dir={directory}", "dry_run=true", "seed=1")
    assert status == 1
    assert re.fullmatch(r"error: hydra.run.dir=.* holds a run of another configuration .*; choose another .*\n", text)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_a_job_that_runs_already_is_refused(job: list[str], folder: Path) -> None:
    directory = folder / "runs" / "mine"
    directory.mkdir(parents=True)
    with RunDirectory(directory, {}).lock():
        status, text = call(*job, f"hydra.run.dir={directory}", "dry_run=true")
    assert status == 1
    assert re.fullmatch(r"error: hydra.run.dir=.* is in use by another process that runs the same job\n", text)
    assert call(*job, f"hydra.run.dir={directory}", "dry_run=true").status == 0
