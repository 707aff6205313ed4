"""Rows of tokens on disk.

A prepared folder holds, for each split, ``<split>.tokens`` (uint16 or uint32, [N, T], row after row) and
``<split>.lengths`` ([N]), with ``meta.json`` and the ``tokenizer.model`` that made them.

Two layouts. ``packed``: the documents' tokens, each document followed by the end of sequence, are one stream that is
cut into rows; the incomplete last row is dropped. ``document``: a document is a row, cut so that the end of sequence
stays, and padded; this is the convention of GaLore's training script.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from tqdm import tqdm

from data.batches import Source
from data.corpora import Corpus, Documents, Split
from data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from data.config import DataConfig

log = logging.getLogger(__name__)

FORMAT = 1  # part of the key: raise it when the same configuration would make other files
DOCUMENTS_AT_ONCE = 512  # tokenised together; also how much work a kill can lose
VALIDATION_SEED = 0


@dataclass(frozen=True)
class Batch:
    """Rows for one forward pass: ``tokens`` int64 [b, T]; the first ``lengths`` (int64 [b]) of each row are real."""

    tokens: torch.Tensor
    lengths: torch.Tensor

    @property
    def loss_tokens(self) -> int:
        """Positions that have a next token to predict."""
        return int(self.lengths.sum()) - len(self.lengths)

    def to(self, device: torch.device) -> Batch:
        """The same rows on ``device``."""
        return Batch(self.tokens.to(device), self.lengths.to(device))


class Rows(Source):
    """The rows of one split, read from disk as they are asked for. Picklable; each process maps the files itself."""

    whole_epochs = False
    by_length = False

    def __init__(self, folder: Path | str, split: Split) -> None:
        meta = json.loads((Path(folder) / "meta.json").read_text(encoding="utf-8"))
        self.folder, self.split = Path(folder), split
        self.sequence_length: int = meta["sequence_length"]
        self._count: int = meta[split]["rows"]
        self._dtype: str = meta["dtype"]
        self._tokens: NDArray[Any] | None = None
        self._lengths: NDArray[Any] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Row ``index``: (tokens, int64 [T]; how many of them are real)."""
        if self._tokens is None:
            self._tokens = self._map("tokens", self._dtype, (self._count, self.sequence_length))
        return torch.from_numpy(self._tokens[index].astype(np.int64)), int(self.lengths[index])

    def collate(self, rows: Sequence[tuple[torch.Tensor, int]]) -> Batch:
        """Rows as one batch."""
        tokens, lengths = zip(*rows, strict=True)
        return Batch(torch.stack(tokens), torch.tensor(lengths, dtype=torch.int64))

    def count(self, indices: NDArray[np.int64]) -> tuple[int, int, int]:
        """Real tokens, positions and loss tokens of these rows."""
        tokens = int(self.lengths[indices].sum(dtype=np.int64))
        return tokens, len(indices) * self.sequence_length, tokens - len(indices)

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """Real tokens of each row, [N]."""
        if self._lengths is None:
            self._lengths = self._map("lengths", "uint32", (self._count,))
        return self._lengths

    def _map(self, what: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        return np.memmap(self.folder / f"{self.split}.{what}", dtype=dtype, mode="r", shape=shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None, "_lengths": None}


def prepare_rows(config: DataConfig, corpus: Corpus, tokenizer: Tokenizer) -> tuple[Path, dict[str, Any]]:
    """Find or make the folder of rows; returns it and its record (see :class:`data.Prepared`)."""
    determines = {
        "format": FORMAT,
        "corpus": corpus.fingerprint,
        "tokenizer": tokenizer.sha256,
        **{
            key: getattr(config, key)
            for key in (
                "name",
                "document",
                "text_field",
                "validation_fraction",
                "rows",
                "sequence_length",
                "max_train_rows",
                "max_validation_rows",
            )
        },
    }
    folder = made_once(config.cache_dir, determines, partial(_make, config=config, corpus=corpus, tokenizer=tokenizer))
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    return folder, {key: value for key, value in meta.items() if key != "dtype"}


def made_once(cache_dir: str, determines: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
    """The folder of the cache that ``determines``, plain JSON, describes, made by ``make`` if it is not there.

    It appears complete or not at all; ``make`` finds in it what a killed attempt left. Processes that ask at once wait
    for the one that works.
    """
    key = hashlib.sha256(json.dumps(determines, sort_keys=True).encode()).hexdigest()[:16]
    cache = Path(cache_dir)
    folder = cache / key
    if not folder.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"data.cache_dir={cache_dir}: no folder can be made there ({error.strerror})") from error
        with FileLock(cache / f"{key}.lock"):
            if not folder.exists():
                log.info("preparing %s", folder)
                unfinished = cache / f"{key}.partial"
                unfinished.mkdir(exist_ok=True)
                make(unfinished)
                os.replace(unfinished, folder)
    return folder


def _make(folder: Path, config: DataConfig, corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Fill ``folder``, going on from what an earlier attempt left. Validation first: it is short and may be wanting."""
    layout = Layout(config.rows, config.sequence_length, tokenizer)
    _write_validation(folder, corpus, layout, config.max_validation_rows)
    validation = _count(folder, "validation", layout)
    if validation["rows"] == 0:
        raise ValueError(_too_short("validation", config))
    _write_train(folder, corpus, layout, config.max_train_rows)
    train = _count(folder, "train", layout)
    if train["rows"] == 0:
        raise ValueError(_too_short("train", config))
    (folder / "tokenizer.model").write_bytes(tokenizer.model)
    meta = {
        "name": config.name,
        "corpus_sha256": corpus.fingerprint,
        "tokenizer_sha256": tokenizer.sha256,
        "tokenizer_vocabulary": tokenizer.pieces,
        "rows": config.rows,
        "sequence_length": config.sequence_length,
        "dtype": layout.dtype,
        "train": train,
        "validation": validation,
    }
    write_json(folder / "meta.json", meta)
    (folder / "progress.json").unlink()  # exists, for there are rows


def _too_short(split: Split, config: DataConfig) -> str:
    hint = "give more text or a smaller data.sequence_length"
    if config.validation_fraction is not None:
        hint += f", or change data.validation_fraction={config.validation_fraction}"
    return (
        f"data={config.name}: the {split} documents are empty or do not fill one row of "
        f"data.sequence_length={config.sequence_length} tokens; {hint}"
    )


def _count(folder: Path, split: Split, layout: Layout) -> dict[str, int]:
    lengths = np.fromfile(folder / f"{split}.lengths", dtype=np.uint32)
    rows, tokens = len(lengths), int(lengths.sum(dtype=np.int64))
    return {
        "rows": rows,
        "tokens": tokens,
        "positions": rows * layout.sequence_length,
        "loss_tokens": tokens - rows,
    }


def write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(temporary, path)


@dataclass(frozen=True)
class Layout:
    """How token ids become rows."""

    rows: str
    sequence_length: int
    tokenizer: Tokenizer

    @property
    def dtype(self) -> str:
        return "uint16" if self.tokenizer.pieces <= 2**16 else "uint32"

    def cut(self, leftover: list[int], documents: list[list[int]]) -> RowBlock:
        """Rows of these documents. ``leftover`` are the ids that the documents before them left without a row."""
        return self._pack(leftover, documents) if self.rows == "packed" else self._pad(documents)

    def _pack(self, leftover: list[int], documents: list[list[int]]) -> RowBlock:
        length = self.sequence_length
        ids = chain(leftover, *((*document, self.tokenizer.eos) for document in documents))
        stream = np.fromiter(ids, dtype=self.dtype)
        count = len(stream) // length
        rows = stream[: count * length].reshape(count, length)
        return RowBlock(rows, np.full(count, length, np.uint32), stream[count * length :].tolist())

    def _pad(self, documents: list[list[int]]) -> RowBlock:
        documents = [[*ids[: self.sequence_length - 1], self.tokenizer.eos] for ids in documents if ids]
        rows = np.full((len(documents), self.sequence_length), self.tokenizer.pad, self.dtype)
        for row, ids in zip(rows, documents, strict=True):
            row[: len(ids)] = ids
        return RowBlock(rows, np.array([len(ids) for ids in documents], np.uint32), [])


@dataclass(frozen=True)
class RowBlock:
    """Some rows: tokens [n, T], lengths [n], and the ids that begin the next row."""

    tokens: NDArray[Any]
    lengths: NDArray[np.uint32]
    leftover: list[int]


def _row_blocks(documents: Documents, layout: Layout, leftover: list[int]) -> Iterator[RowBlock]:
    iterator = iter(documents)
    while texts := list(islice(iterator, DOCUMENTS_AT_ONCE)):
        block = layout.cut(leftover, layout.tokenizer.encode(texts))
        leftover = block.leftover
        yield block


def _progress_bar(split: Split, *, done: int, total: int | None) -> tqdm[Any]:
    return tqdm(desc=f"{split} rows", initial=done, total=total, unit=" rows", disable=None)


def _write_validation(folder: Path, corpus: Corpus, layout: Layout, max_rows: int | None) -> None:
    """All rows in memory, shuffled, so that a prefix is a fair sample and evaluation may stop early.

    From a corpus whose order has a meaning, ``max_rows`` are drawn from the whole split, else they are its first.
    """
    tokens_file, lengths_file = folder / "validation.tokens", folder / "validation.lengths"
    if lengths_file.exists():  # written last
        return
    blocks, count = [], 0
    with _progress_bar("validation", done=0, total=max_rows) as bar:
        for block in _row_blocks(corpus.documents("validation"), layout, leftover=[]):
            blocks.append(block)
            count += len(block.tokens)
            bar.update(len(block.tokens))
            if corpus.shuffled and max_rows is not None and count >= max_rows:
                break
    if corpus.shuffled and max_rows is not None:
        count = min(count, max_rows)
    chosen = np.random.default_rng(VALIDATION_SEED).permutation(count)[:max_rows]
    tokens = np.concatenate([np.empty((0, layout.sequence_length), layout.dtype), *(b.tokens for b in blocks)])
    lengths = np.concatenate([np.empty(0, np.uint32), *(b.lengths for b in blocks)])
    tokens[chosen].tofile(tokens_file)
    temporary = lengths_file.with_suffix(".tmp")
    lengths[chosen].tofile(temporary)
    os.replace(temporary, lengths_file)


@dataclass
class Progress:
    """What of the training rows is on disk, and where in the corpus the next ones begin."""

    rows: int = 0
    leftover: list[int] = field(default_factory=list)
    stream: dict[str, Any] | None = None


def _open_at(path: Path, size: int) -> BinaryIO:
    """``path`` for appending after its first ``size`` bytes; what an interrupted write left behind them is dropped."""
    path.touch()
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file


def _write_train(folder: Path, corpus: Corpus, layout: Layout, max_rows: int | None) -> None:
    """Append rows block by block. After each block the position is noted, so that a killed attempt can be continued."""
    progress_file = folder / "progress.json"
    progress = Progress(**json.loads(progress_file.read_text())) if progress_file.exists() else Progress()
    documents = corpus.documents("train")
    if progress.stream is not None:
        documents.load_state_dict(progress.stream)
    row_bytes = layout.sequence_length * np.dtype(layout.dtype).itemsize
    with (
        _open_at(folder / "train.tokens", progress.rows * row_bytes) as tokens_file,
        _open_at(folder / "train.lengths", progress.rows * np.dtype(np.uint32).itemsize) as lengths_file,
        _progress_bar("train", done=progress.rows, total=max_rows) as bar,
    ):
        blocks = _row_blocks(documents, layout, progress.leftover)
        while max_rows is None or progress.rows < max_rows:
            block = next(blocks, None)
            if block is None:
                break
            room = None if max_rows is None else max_rows - progress.rows
            block.tokens[:room].tofile(tokens_file)
            block.lengths[:room].tofile(lengths_file)
            for file in (tokens_file, lengths_file):
                file.flush()
                os.fsync(file.fileno())
            written = len(block.tokens[:room])
            progress = Progress(progress.rows + written, block.leftover, documents.state_dict())
            write_json(progress_file, vars(progress))
            bar.update(written)
