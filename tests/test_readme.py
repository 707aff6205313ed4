"""The README's code runs as it stands, and its files and commands exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import nn

import train
from tsr import TSR
from tsr.refresh import METHODS

ROOT = Path(train.__file__).parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_own_loop_runs_and_counts() -> None:
    (example,) = (text for text in blocks("python") if "Communicator" in text)
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    # 2 linears and the embedding as cores, the rest dense: 16^2 * 2 + 8^2, head 500 * 64 and four biases, at 4 bytes.
    assert names["sent"].by_role() == {"core": 4 * (2 * 256 + 64), "dense": 4 * (500 * 64 + 256 + 64 + 500)}
    assert torch.isfinite(names["loss"])


def test_new_refresh_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = (text for text in blocks("python") if "half_sketch" in text)
    for name in list(METHODS):
        monkeypatch.setitem(METHODS, name, METHODS[name])  # restores the table afterwards
    monkeypatch.setitem(METHODS, "half_sketch", METHODS["sketch"])
    exec(compile(example, "README.md", "exec"), {})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20, bias=False))
    optimizer = TSR(
        model, roles={"linear": ["0.weight"]}, lr=0.05, scale=1.0, rank={"linear": 4}, refresh={"method": "half_sketch"}
    )
    inputs = torch.randn(64, 12)
    target = inputs @ torch.randn(12, 20) * 0.1
    losses = []
    for _ in range(30):
        loss = (model(inputs) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == 1:
            assert optimizer.communicator.ledger.last.by_role() == {"core": 4 * 16, "sketch": 4 * 20 * 4}
    assert losses[-1] < 0.9 * losses[0]


def test_new_optimizer_is_one_file(tmp_path: Path) -> None:
    (example,) = (text for text in blocks("yaml") if "tsr_rotate" in text)
    folder = tmp_path / "conf"
    for path in (ROOT / "conf").rglob("*.yaml"):
        copy = folder / path.relative_to(ROOT / "conf")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    (folder / "optimizer" / "tsr_rotate.yaml").write_text(example)
    with initialize_config_dir(str(folder), version_base="1.3"):
        config = train.plain(compose("config", overrides=["optimizer=tsr_rotate"]))
    assert config["optimizer"]["name"] == "tsr_rotate"
    assert config["optimizer"]["moments"] == "rotate"
    assert config["subspace"] == {"linear": "two_sided", "embedding": "one_sided", "head": "two_sided"}
    train.check(config)


def test_files_and_overrides_that_it_names_exist() -> None:
    for folder in ("tsr/harness/", "models/", "data/", "sweep/", "tests/", "conf/"):
        assert f"    {folder}" in README and (ROOT / folder).is_dir()
    pictures = re.findall(r"\]\(([^\s)]+)\)", README)
    assert len(pictures) >= 5 and all((ROOT / path).exists() for path in pictures)
    jobs = [line.split("#")[0].split() for line in README.splitlines() if re.match(r"    python train\.py [a-z]", line)]
    assert len(jobs) >= 3
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for _, _, *overrides in jobs:
            config = train.plain(compose("config", overrides=overrides))
            assert OmegaConf.create(config)
            train.check(config)
