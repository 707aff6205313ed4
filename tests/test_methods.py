"""A method is written down twice, for the library and for the configuration: both must say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import train
import tsr

YAML_OF = {
    "AdamW": "adamw",
    "GaLore": "galore",
    "OneSided": "one_sided",
    "TSR": "tsr",
    "TSRPaper": "tsr_paper",
    "TSRSVD": "tsr_svd",
}


@pytest.mark.parametrize("method", YAML_OF)
def test_factories_and_configuration_make_the_same_method(method: str) -> None:
    with initialize_config_dir(str(Path(train.__file__).parent / "conf"), version_base="1.3"):
        config = train.plain(compose("config", overrides=[f"optimizer={YAML_OF[method]}"]))
    model = train.build_model(config, "meta")
    groups = {key: config[key] for key in ("rank", "lr_factor")}
    configured = train.build_optimizer(config, model, tsr.Communicator())
    made = getattr(tsr, method)(model, lr=config["optimizer"]["lr"], **groups)
    assert made.options == configured.options
    assert made.refresh == configured.refresh
    assert [(b.subspace, b.rank, b.interval) for b in made.blocks] == [
        (b.subspace, b.rank, b.interval) for b in configured.blocks
    ]
