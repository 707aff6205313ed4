"""The bench of single steps: what it times, what it counts, and the tables it makes of them."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweep.bench import memory, steps
from sweep.bench.memory import gradient_memory
from sweep.bench.steps import alternate, model_of
from train import build_optimizer
from tsr import Communicator

SMALL = ("model=llama_60m", "model.hidden_size=64", "model.intermediate_size=96", "model.vocab_size=500")


def test_pieces_take_turns_and_the_first_turn_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    order: list[str] = []

    def piece(name: str, seconds: list[float]) -> None:
        nonlocal now
        order.append(name)
        now += seconds.pop(0)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    slow, fast = [100.0, 3.0, 1.0, 2.0], [50.0, 0.25, 0.75, 0.5]
    found = alternate({"slow": lambda: piece("slow", slow), "fast": lambda: piece("fast", fast)}, repeats=3)
    assert found == {"slow": 2.0, "fast": 0.5}
    assert order == ["slow", "fast"] * 4


def test_memory_of_gradients_is_all_of_them_or_the_largest_and_the_cores() -> None:
    job = (*SMALL, "optimizer=tsr", "rank.linear=8", "rank.embedding=4", "rank.head=4", "refresh.embedding=100")
    peaks = gradient_memory(*job, passes=3, length=8)
    config, model = model_of(*job)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert peaks["dense"] >= sum(sizes)
    assert peaks["dense"] <= sum(sizes) + max(sizes)  # the gradient that arrives, before it is added
    blocks = build_optimizer(config, model, Communicator()).blocks
    cores = sum(4 * block.rank**2 for block in blocks if block.is_low_rank)
    dense = sum(block.parameter.nbytes for block in blocks if not block.is_low_rank)
    assert max(sizes) < peaks["core"] <= max(sizes) + cores + 2 * dense


def test_the_steps_command_writes_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = steps.compose
    monkeypatch.setattr(
        steps,
        "compose",
        lambda *job: real(*job, *SMALL[1:], "model.num_layers=1", "rank.linear=8", "rank.embedding=4"),
    )
    monkeypatch.setitem(steps.METHODS, "tsr_head", ("optimizer=tsr", "rank.head=4"))
    (readme := tmp_path / "README.md").write_text("<!-- begin steps -->\n<!-- end steps -->\n")
    arguments = ["--out", str(tmp_path), "--tokens", "32", "--loop-tokens", "32", "--length", "16", "--repeats", "1"]
    assert steps.main([*arguments, "--readme", str(readme), "steps"]) == 0
    result = json.loads((tmp_path / "steps-llama_60m.json").read_text())
    assert set(result["mean"]) == {"adamw", "tsr", "tsr_head", "torch_fused", "torch_foreach"}
    for name, seconds in result["mean"].items():
        assert 0 < result["lightest"].get(name, seconds) <= seconds <= result["heaviest"].get(name, seconds)
    assert result["state_bytes"]["tsr_head"] < result["state_bytes"]["tsr"] < result["state_bytes"]["adamw"]
    assert min(result["tokens_per_s"].values()) > 0
    shown = capsys.readouterr().out
    assert "| tsr_head" in shown and "tokens a second" in shown.lower()
    assert "| tsr_head" in readme.read_text()


def test_one_real_step_in_bf16_is_finite_and_its_memory_is_that_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = steps.compose
    monkeypatch.setattr(steps, "compose", lambda *job: real(*job, *SMALL[1:], "rank.linear=8", "rank.embedding=4"))
    found = memory.one_step("llama_60m", length=16)
    assert found["finite"] == 1.0
    assert 5 < found["loss"] < 8  # ln 500 is 6.2
    assert found["peak_bytes"] > 100e6
    assert found["forward_backward_s"] > 0 < found["optimizer_s"]


def test_what_adamw_would_take_is_twelve_bytes_a_parameter() -> None:
    layers = 8 * (4 * 512**2 + 3 * 512 * 1376 + 2 * 512)
    parameters = 2 * 32_000 * 512 + layers + 512
    assert memory.predicted("llama_60m", "adamw") == pytest.approx(12 * parameters, rel=1e-6)
    assert memory.predicted("llama_60m", "tsr") < 10 * parameters


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        (steps.main, ["--model", "gpt"], "--model must be one of llama_60m"),
        (steps.main, ["--length", "0"], "--length must be a whole number from 1, got 0"),
        (steps.main, ["--tokens", "16"], "--tokens must be a whole number from 256, the --length, got 16"),
        (steps.main, ["--repeats", "0"], "--repeats must be a whole number from 1, got 0"),
        (
            steps.main,
            ["--readme", "nowhere.md", "steps"],
            "--readme must begin with a file that exists, got 'nowhere.md'",
        ),
        (memory.main, ["--models", "llama_60m,gpt"], "--models must be one of llama_60m"),
        (memory.main, ["--step", "gpt"], "--step must be one of llama_60m"),
        (memory.main, ["--passes", "0"], "--passes must be a whole number from 1, got 0"),
        (
            memory.main,
            ["--readme", "nowhere.md", "memory"],
            "--readme must begin with a file that exists, got 'nowhere.md'",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(
    command: Callable[[list[str]], int],
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(["--out", str(tmp_path / "out"), *arguments]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert said in error
    assert "\n" not in error
    assert not (tmp_path / "out").exists()


def test_a_step_that_the_kernel_ends_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise subprocess.CalledProcessError(-signal.SIGKILL, ["python"])

    monkeypatch.setattr(memory, "step_apart", killed)
    assert memory.main(["--out", str(tmp_path / "out"), "--models", "llama_60m", "--step", "llama_1b"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the step of llama_1b was killed") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [steps.main, memory.main])
def test_out_must_be_a_folder(
    command: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "file").write_text("")
    assert command(["--out", str(file)]) == 1
    assert f"--out must be a folder, or a place for a new one, got {file}" in capsys.readouterr().err
