"""What a user may ask of the data, checked when it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{key} must be one of {', '.join(choices)}, got {value!r}")


def check_at_least(key: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key} must be a whole number of at least {least}, got {value!r}")


def check_text(key: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} must be a text, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """A given SentencePiece model (``path``) or, without one, ``vocab_size`` pieces trained on the corpus."""

    path: str | None = None
    vocab_size: int = 2048

    def __post_init__(self) -> None:
        check_at_least("data.tokenizer.vocab_size", self.vocab_size, 1)
        if self.path is not None:
            check_text("data.tokenizer.path", self.path)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The group ``data`` of the configuration.

    Args:
        name: the source: ``stdlib``, ``text`` or ``c4``.
        rows: ``packed`` (documents joined, no padding) or ``document`` (one document a row, truncated or padded).
        sequence_length: T, tokens of a row.
        validation_fraction: share of the documents held out; None for C4, which has a validation split of its own.
        max_train_rows: no more than so many rows, the first in corpus order; None is all. C4 requires it.
        max_validation_rows: the same for validation, drawn from the whole of it; None is all.
        cache_dir: where tokenizers and rows are kept.
        num_workers: loader processes of each rank; they do not change the order.
        paths: text: files and folders (``*.txt``, ``*.jsonl``).
        document: text: what a ``.txt`` file holds: a document per ``line``, or the ``file`` is one.
        text_field: text and c4: the field of a record that holds the text.
        repository, subset, revision: c4: its place on the Hugging Face Hub; ``repository`` may be a local folder.

    Raises:
        ValueError: naming the key, the value and what would be right.
    """

    name: str
    rows: str = "packed"
    sequence_length: int = 256
    validation_fraction: float | None = 0.05
    max_train_rows: int | None = None
    max_validation_rows: int | None = None
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    cache_dir: str = ".cache"
    num_workers: int = 0
    paths: Sequence[str] = ()
    document: str = "line"
    text_field: str = "text"
    repository: str = "allenai/c4"
    subset: str = "en"
    revision: str = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"

    def __post_init__(self) -> None:
        check_choice("data.name", self.name, ("stdlib", "text", "c4"))
        check_choice("data.rows", self.rows, ("packed", "document"))
        check_choice("data.document", self.document, ("line", "file"))
        check_at_least("data.sequence_length", self.sequence_length, 2)
        check_at_least("data.num_workers", self.num_workers, 0)
        for key in ("max_train_rows", "max_validation_rows"):
            if getattr(self, key) is not None:
                check_at_least(f"data.{key}", getattr(self, key), 1)
        for key in ("cache_dir", "text_field", "repository", "subset", "revision"):
            check_text(f"data.{key}", getattr(self, key))
        if self.name == "c4":
            if self.max_train_rows is None:
                raise ValueError(
                    "data.max_train_rows=null, but C4 has 365 million documents; "
                    "give the rows that the run needs: trainer.steps times trainer.global_batch"
                )
        elif not isinstance(self.validation_fraction, float) or not 0 < self.validation_fraction < 1:
            raise ValueError(f"data.validation_fraction must be between 0 and 1, got {self.validation_fraction!r}")
        if self.name == "text":
            if isinstance(self.paths, str):
                raise ValueError(f"data.paths must be a list, got {self.paths!r}; write data.paths=[{self.paths}]")
            if not isinstance(self.paths, Sequence) or not all(isinstance(path, str) for path in self.paths):
                raise ValueError(f"data.paths must be a list of files or folders, got {self.paths!r}")
            if not self.paths:
                raise ValueError("data.paths is empty; give files or folders with text, as in data.paths=[corpus.txt]")
