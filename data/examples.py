"""Labelled examples as rows of tokens: GLUE (`data.glue`) through a pretrained encoder's own tokenizer.

A prepared folder holds, for each split of `train` and `validation`, the tokens of all rows one after the other
(`<split>.tokens.npy`, `<split>.types.npy`), where each row ends (`<split>.ends.npy`), and its label
(`<split>.labels.npy`), with `meta.json`. The validation examples of MNLI are the matched ones, then the mismatched.

A row is what the tokenizer makes of one or two sentences, with its special tokens, cut to `sequence_length` at the
end of the longer sentence. Rows are padded only as far as the longest of their micro-batch needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data.batches import Source
from data.config import check_at_least, check_text
from data.glue import REPOSITORY, REVISION, TASKS, Example, Splits, content_sha256, find_task, load
from data.rows import made_once, write_json

FORMAT = 1  # part of the key: raise it when the same configuration would make other files
SHORTEST = 8  # tokens: room for special tokens and something of each sentence
AT_ONCE = 1024  # examples tokenised together


@dataclass(frozen=True, kw_only=True)
class GlueConfig:
    """The group `data` of the configuration where it is `glue`.

    Args:
        name: `glue`.
        task: one of `data.glue.TASKS`.
        path: the folder of GLUE TSV files; None is `nyu-mll/glue` on the Hugging Face Hub.
        sequence_length: the most tokens of a row; longer ones are cut.
        tokenizer: where the tokenizer is, as `model.weights`; None is where the model's weights are.
        train_rows: examples of the training split as the Hub has it, for dry runs, which read no data.
        cache_dir: where rows are kept.
        num_workers: loader processes of each rank; they do not change the order.

    Raises:
        ValueError: naming the key, the value and what would be right.
    """

    name: str
    task: str
    path: str | None
    sequence_length: int
    tokenizer: str | None
    train_rows: int
    cache_dir: str
    num_workers: int

    def __post_init__(self) -> None:
        find_task(self.task)
        check_at_least("data.sequence_length", self.sequence_length, SHORTEST)
        check_at_least("data.num_workers", self.num_workers, 0)
        check_at_least("data.train_rows", self.train_rows, 1)
        check_text("data.cache_dir", self.cache_dir)
        for key in ("path", "tokenizer"):
            if getattr(self, key) is not None:
                check_text(f"data.{key}", getattr(self, key))

    @property
    def labels(self) -> int:
        """Outputs that a classifier needs for the task: classes, or 1 for a score."""
        return max(1, len(TASKS[self.task].labels))


@dataclass(frozen=True)
class LabelledBatch:
    """Rows for one forward pass.

    `tokens` and `types` int64 [b, T] are padded to the longest row; the first `lengths` (int64 [b]) of each are real.
    `labels` [b] are classes (int64) or scores (float32), and `index` int64 [b] the examples' positions in their split.
    """

    tokens: torch.Tensor
    types: torch.Tensor
    lengths: torch.Tensor
    labels: torch.Tensor
    index: torch.Tensor

    @property
    def loss_tokens(self) -> int:
        """Terms of the loss: examples."""
        return len(self.labels)

    def to(self, device: torch.device) -> LabelledBatch:
        """The same rows on `device`."""
        return LabelledBatch(*(value.to(device) for value in vars(self).values()))


class Examples(Source):
    """The rows of one split, read from disk as they are asked for. Picklable; each process maps the files itself."""

    whole_epochs = True
    by_length = True

    def __init__(self, folder: Path | str, split: str) -> None:
        self.folder, self.split = Path(folder), split
        self.meta: dict[str, Any] = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
        self.splits: dict[str, int] = self.meta["splits"] if split == "validation" else {split: len(self)}
        self._arrays: dict[str, NDArray[Any]] = {}

    def __len__(self) -> int:
        return int(self.meta[self.split]["rows"])

    def __getitem__(self, index: int) -> int:
        """The index itself: `collate` reads the rows."""
        return index

    def _array(self, what: str) -> NDArray[Any]:
        if what not in self._arrays:
            self._arrays[what] = np.load(self.folder / f"{self.split}.{what}.npy", mmap_mode="r")
        return self._arrays[what]

    @property
    def labels(self) -> NDArray[Any]:
        """int64 classes or float32 scores, [N]."""
        return self._array("labels")

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, [N]."""
        if "lengths" not in self._arrays:
            self._arrays["lengths"] = np.diff(self._array("ends"), prepend=0)
        return self._arrays["lengths"]

    def collate(self, rows: Sequence[int]) -> LabelledBatch:
        """The rows of these indices as one batch."""
        index = np.asarray(rows)
        lengths = self.lengths[index]
        tokens = np.full((len(index), int(lengths.max())), self.meta["pad_token"], np.int64)
        types = np.zeros_like(tokens)
        for row, (end, length) in enumerate(zip(self._array("ends")[index], lengths, strict=True)):
            tokens[row, :length] = self._array("tokens")[end - length : end]
            types[row, :length] = self._array("types")[end - length : end]
        parts = (tokens, types, lengths, np.array(self.labels[index]), index)
        return LabelledBatch(*map(torch.from_numpy, parts))

    def count(self, indices: NDArray[np.int64]) -> tuple[int, int, int]:
        """Tokens, positions (padding is a matter of the micro-batch and not counted) and examples of these rows."""
        tokens = int(self.lengths[indices].sum())
        return tokens, tokens, len(indices)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": {}}


def prepare_examples(config: GlueConfig, *, tokenizer: Path, vocab_size: int, pad_token: int, token_types: int) -> Path:
    """Make the rows that `config` describes with the tokenizer in the folder `tokenizer`, or find them in the cache.

    `vocab_size`, `pad_token` and `token_types` are the model's. Returns the folder, whose `meta.json` is the record of
    `data.Prepared`, with `task`, `source`, `splits` (examples of each part of the validation split) and, by split, the
    tokens of the `longest` row. Safe to call from all ranks at once.

    Raises:
        ValueError: for what is wrong with the files of the task, or a tokenizer that is not the model's.
        ConnectionError: if the Hub is needed and cannot be reached.
    """
    encoder = _Encoder(tokenizer, config.sequence_length)
    if encoder.vocabulary > vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size}, but the tokenizer in '{tokenizer}' has {encoder.vocabulary} pieces; set "
            f"data.tokenizer to the model's own"
        )
    if encoder.pad_token != pad_token:
        raise ValueError(
            f"model.pad_token_id={pad_token}, but the tokenizer in '{tokenizer}' pads with {encoder.pad_token}; set "
            f"data.tokenizer to the model's own"
        )
    if encoder.token_types > token_types and len(TASKS[config.task].sentences) > 1:
        raise ValueError(
            f"model.token_types={token_types}, but the tokenizer in '{tokenizer}' has {encoder.token_types}; set "
            f"data.tokenizer to the model's own"
        )
    splits = load(config.task, config.path)
    content = content_sha256(splits)
    determines = {
        **{"format": FORMAT, "task": config.task, "content": content, "tokenizer": encoder.sha256},
        "sequence_length": config.sequence_length,
    }
    record = {
        **{"name": config.name, "task": config.task},
        "source": f"{REPOSITORY}@{REVISION}" if config.path is None else "TSV files",
        **{"corpus_sha256": content, "tokenizer_sha256": encoder.sha256, "tokenizer_vocabulary": encoder.vocabulary},
        **{"sequence_length": config.sequence_length, "pad_token": encoder.pad_token},
        "splits": {name: len(examples) for name, examples in splits.items() if name != "train"},
    }
    return made_once(
        config.cache_dir, determines, partial(_make, splits=splits, encoder=encoder, record=record, task=config.task)
    )


class _Encoder:
    """A tokenizer as it was saved with a model: sentences to token ids and token types."""

    def __init__(self, folder: Path, sequence_length: int) -> None:
        from transformers import AutoTokenizer  # seconds: only when it is asked for

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers and tokenizers report a bad file in many ways
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"data.tokenizer: the tokenizer in '{folder}' cannot be read ({type(error).__name__}: {reason})"
            ) from error
        self._length = sequence_length
        self.vocabulary = len(self._tokenizer)
        self.pad_token = self._tokenizer.pad_token_id
        self.token_types = 1 + max(self._tokenizer("a", "b", return_token_type_ids=True)["token_type_ids"])
        state = [*sorted(self._tokenizer.get_vocab().items()), self._tokenizer("a b", "c")["input_ids"]]
        self.sha256 = hashlib.sha256(json.dumps(state).encode()).hexdigest()

    def encode(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], list[int]]]:
        """Tokens of each row and their types."""
        texts = [list(part) for part in zip(*(example.sentences for example in examples), strict=True)]
        rows = self._tokenizer(
            *texts,
            truncation="longest_first",
            max_length=self._length,
            padding=False,
            return_token_type_ids=True,
            return_attention_mask=False,
        )
        return zip(rows["input_ids"], rows["token_type_ids"], strict=True)


def _make(folder: Path, splits: Splits, encoder: _Encoder, record: Mapping[str, Any], task: str) -> None:
    """Fill `folder`; what a killed attempt left there is written over."""
    validation = [example for name in record["splits"] for example in splits[name]]
    label_type = np.int64 if TASKS[task].labels else np.float32
    counts: dict[str, dict[str, int]] = {}
    for split, examples in (("train", splits["train"]), ("validation", validation)):
        rows = [
            row
            for start in range(0, len(examples), AT_ONCE)
            for row in encoder.encode(examples[start : start + AT_ONCE])
        ]
        arrays: dict[str, NDArray[Any]] = {
            "tokens": np.fromiter((token for ids, _ in rows for token in ids), np.int32),
            "types": np.fromiter((kind for _, types in rows for kind in types), np.int8),
            "ends": np.cumsum([len(ids) for ids, _ in rows], dtype=np.int64),
            "labels": np.array([example.label for example in examples], label_type),
        }
        for what, array in arrays.items():
            np.save(folder / f"{split}.{what}.npy", array)
        tokens = len(arrays["tokens"])
        counts[split] = {"rows": len(rows), "tokens": tokens, "positions": tokens, "loss_tokens": len(rows)}
        counts[split]["longest"] = max(len(ids) for ids, _ in rows)
    write_json(folder / "meta.json", {**record, **counts})
