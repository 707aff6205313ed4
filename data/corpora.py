"""Corpora: where documents come from, always in the same order.

A corpus has a fingerprint (sha256) that changes with its content, a stream of documents for each split, and a bounded
sample of its training documents for the tokenizer. A stream knows its position, so that a preparation that was killed
can go on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from datasets import IterableDataset

    from data.config import DataConfig

Split = Literal["train", "validation"]

STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Documents(Protocol):
    """A stream of documents that can continue from a position (a JSON value) in another process."""

    def __iter__(self) -> Iterator[str]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Corpus(Protocol):
    """A source of documents. ``shuffled`` says that any part of a stream is as good a sample as any other."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def shuffled(self) -> bool: ...
    def documents(self, split: Split) -> Documents: ...
    def sample(self, limit: int) -> Iterator[str]: ...


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that ``config`` names. Reads local files once, for the fingerprint; the network only on iteration."""
    if config.name == "c4":
        return HubCorpus(config.repository, config.subset, config.revision, config.text_field)
    files, read = stdlib_files() if config.name == "stdlib" else text_files(config)
    assert config.validation_fraction is not None
    return LocalCorpus(config.name, files, read, config.validation_fraction, _fingerprint(files), _size(files))


def stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> tuple[list[tuple[str, Path]], ReadFile]:
    """Python's own standard library without its tests; a document is a source file."""
    root = stdlib_root()
    files = [(path.relative_to(root).as_posix(), path) for path in root.rglob("*.py")]
    files = sorted((name, path) for name, path in files if STDLIB_EXCLUDED.isdisjoint(name.split("/")))
    if not files:
        raise ValueError(f"data.name=stdlib: this Python has no library sources in '{root}'; use data=text")
    return files, lambda path: iter([path.read_text(encoding="utf-8", errors="replace")])


def text_files(config: DataConfig) -> tuple[list[tuple[str, Path]], ReadFile]:
    """The files of ``data.paths``, folders searched recursively, and how to read them."""
    files: list[tuple[str, Path]] = []
    for given in map(Path, config.paths):
        if not given.exists():
            raise ValueError(f"data.paths: '{given}' does not exist; give a file or folder with text")
        if given.is_file():
            found = [(given.name, given)]
        else:
            found = [(path.relative_to(given).as_posix(), path) for path in given.rglob("*") if path.is_file()]
        found = sorted((name, path) for name, path in found if path.suffix in (".txt", ".jsonl"))
        if not found:
            raise ValueError(
                f"data.paths: no text found in '{given}' (looked for *.txt, *.jsonl); give a file or folder with text"
            )
        files += found

    def read(path: Path) -> Iterator[str]:
        if path.suffix == ".jsonl":
            return _read_records(path, config.text_field)
        return _read_text(path, config.document)

    return files, read


def _read_text(path: Path, document: str) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            if document == "file":
                yield file.read()
            else:
                yield from (line.removesuffix("\n") for line in file)
    except UnicodeDecodeError as error:
        raise ValueError(f"data.paths: '{path}' is not UTF-8 ({error}); convert it or leave it out") from error


def _read_records(path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(_read_text(path, "line"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[text_field]
        except json.JSONDecodeError as error:
            raise ValueError(f"data.paths: line {number} of '{path}' is not JSON ({error})") from error
        except (KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ValueError(
                f"data.text_field={text_field}: line {number} of '{path}' has no text under this name; "
                "name the field that holds the text"
            )
        # JSON can spell half a surrogate pair, which is no character.
        yield text.encode("utf-8", "replace").decode("utf-8")


ReadFile = Callable[[Path], Iterator[str]]


def _fingerprint(files: list[tuple[str, Path]]) -> str:
    """sha256 over each file's relative path and content, in order."""
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
    return digest.hexdigest()


def _size(files: list[tuple[str, Path]]) -> int:
    return sum(path.stat().st_size for _, path in files)


def _uniform(text: str, *, draw: int) -> float:
    """A number in [0, 1) that depends on the text alone; draws 0 to 3 are independent of each other."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return int.from_bytes(digest[8 * draw : 8 * draw + 8], "big") / 2**64


@dataclass(frozen=True)
class LocalCorpus:
    """Files on disk. A document's own hash decides its split, so equal documents are always on the same side."""

    name: str
    files: list[tuple[str, Path]]
    read: ReadFile
    validation_fraction: float
    fingerprint: str
    size: int
    shuffled = False

    def documents(self, split: Split) -> LocalDocuments:
        return LocalDocuments(self, split)

    def sample(self, limit: int) -> Iterator[str]:
        """About ``limit`` bytes of the training documents, chosen by their hash from the whole corpus."""
        share = limit / max(self.size, 1)
        return (text for text in self.documents("train") if share >= 1 or _uniform(text, draw=1) < share)


class LocalDocuments:
    """The documents of one split of a :class:`LocalCorpus`; the position is the number of documents read."""

    def __init__(self, corpus: LocalCorpus, split: Split) -> None:
        self._corpus, self._split = corpus, split
        self._position = 0

    def __iter__(self) -> Iterator[str]:
        for text in islice(self._from_start(), self._position, None):
            self._position += 1
            yield text

    def _from_start(self) -> Iterator[str]:
        for _, path in self._corpus.files:
            for text in self._corpus.read(path):
                held_out = _uniform(text, draw=0) < self._corpus.validation_fraction
                if text.strip() and held_out == (self._split == "validation"):
                    yield text

    def state_dict(self) -> dict[str, Any]:
        return {"documents": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["documents"]


@dataclass(frozen=True)
class HubCorpus:
    """C4, streamed with `datasets`, never downloaded as a whole; its own validation split.

    The fingerprint trusts the pinned revision. A local copy (``repository`` is a folder) is trusted not to change.
    """

    repository: str
    subset: str
    revision: str
    text_field: str
    name = "c4"
    shuffled = True

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.repository}\0{self.subset}\0{self.revision}".encode()).hexdigest()

    def documents(self, split: Split) -> HubDocuments:
        return HubDocuments(self, split)

    def sample(self, limit: int) -> Iterator[str]:
        """The first ``limit`` bytes: C4 comes shuffled."""
        for text in self.documents("train"):
            limit -= len(text.encode("utf-8"))
            if limit < 0:
                return
            yield text


def http_error() -> type[Exception]:
    """What a broken connection may raise besides OSError: the error of the Hub's HTTP client, whichever that is."""
    from huggingface_hub.errors import HfHubHTTPError

    return next((base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"), OSError)


class HubDocuments:
    """The documents of one split of a :class:`HubCorpus`; the position is that of the `datasets` stream.

    The stream is opened on iteration, each time anew: in some versions of `datasets` (issue 8308) the state of a stream
    no longer advances once it was resumed; tests/test_data_rows.py resumes several times to guard against it.
    """

    def __init__(self, corpus: HubCorpus, split: Split) -> None:
        self._corpus, self._split = corpus, split
        self._state: dict[str, Any] | None = None
        self._stream: IterableDataset | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            self._stream = self._open()
            if self._state is not None:
                self._stream.load_state_dict(self._state)
            for record in self._stream:
                text = record.get(self._corpus.text_field)
                if not isinstance(text, str):
                    raise ValueError(
                        f"data.text_field={self._corpus.text_field}: no text under this name in "
                        f"{self._corpus.repository}; its fields are {', '.join(record)}"
                    )
                yield text
        except (OSError, http_error()) as error:
            raise ConnectionError(
                f"data=c4: cannot read {self._corpus.repository} ({type(error).__name__}: {error}). Without a network, "
                "point HF_HOME to a cache that holds it, set data.repository to the folder of a local copy, or use "
                "data=text or data=stdlib. Rows made so far are kept; the next attempt continues from them"
            ) from error

    def _open(self) -> IterableDataset:
        from datasets import load_dataset

        corpus = self._corpus
        return load_dataset(
            corpus.repository, corpus.subset, split=self._split, revision=corpus.revision, streaming=True
        )

    def state_dict(self) -> dict[str, Any]:
        assert self._stream is not None, "a stream has a state once it was iterated"
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state
