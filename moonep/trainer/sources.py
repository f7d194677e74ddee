"""Where text comes from: the running interpreter's standard library, a text file, or a folder of them."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from moonep.errors import DataError

# Not part of the default corpus. Tests and installed packages are not the library's own code and differ
# between machines; the code tables of `encodings` are generated and nearly equal to one another, so that a
# split by file would put the same text on both sides.
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
)
EXCLUDED_PATTERNS = ("config-*", "__phello__*", "pydoc_data/topics.py", "_sysconfigdata*")

# Texts that a shipped configuration names and the project does not carry.
KNOWN_TEXTS = {
    "tinyshakespeare.txt": "the path of data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn",
}

# Text is tokenized in memory; more than this belongs into memory-mapped shards.
MAX_RAW_BYTES = 2 << 30


@dataclass(frozen=True)
class TextSource:
    """Documents, in a fixed order.

    Attributes:
        label: what the source is, for people.
        root: folder that the file names are relative to.
        files: the documents, sorted by their relative POSIX path.
        skipped: files left out because they are binary.
    """

    label: str
    root: Path
    files: Sequence[Path]
    skipped: int = 0

    def documents(self) -> Iterator[tuple[str, bytes]]:
        """(relative path, content) of every document, empty ones left out."""
        for path in self.files:
            content = path.read_bytes()
            if content:
                yield path.relative_to(self.root).as_posix(), content


def open_source(path: str | None, pattern: str = "*") -> TextSource:
    """The source behind `data.path`, of a size that is tokenized in memory.

    Args:
        path: a text file, a folder (read recursively, hidden files left out), or None: the standard library.
        pattern: which file names of a folder to read, shell style.

    Raises:
        DataError: nothing there, nothing matches, or more text than `MAX_RAW_BYTES`.
    """
    source = find_files(path, pattern)
    size = sum(p.stat().st_size for p in source.files)
    if size > MAX_RAW_BYTES:
        raise DataError(
            f"data.path={path} holds {size / 2**30:.1f} GiB of text, more than is tokenized in"
            f" memory; run python -m tools.prepare_data data.path={path} out=DIR, then use data.path=DIR"
        )
    return source


def find_files(
    path: str | None, pattern: str = "*", keep: Callable[[Path], bool] = lambda path: False
) -> TextSource:
    """Like `open_source`, of any size; `keep(path)` is true for binary files to be taken all the same."""
    if path is None:
        return stdlib_source()
    root = Path(path).expanduser()
    if not root.exists():
        hint = KNOWN_TEXTS.get(root.name, "a text file or a folder")
        raise DataError(f"data.path={path} does not exist (seen from {Path.cwd()}); give {hint}")
    if root.is_file():
        source = TextSource(root.name, root.parent, [root])
    else:
        found = [p for p in root.rglob(pattern) if not _is_hidden(p.relative_to(root)) and p.is_file()]
        texts = [p for p in found if keep(p) or not _is_binary(p)]
        if not texts:
            raise DataError(f"data.path={path} holds no text file that matches data.pattern={pattern!r}")
        source = TextSource(f"folder {root}", root, _sorted(texts, root), len(found) - len(texts))
    if not any(p.stat().st_size for p in source.files):
        raise DataError(f"data.path={path} is empty; give a text file or a folder with text in it")
    return source


def stdlib_source() -> TextSource:
    """The standard library's `.py` files, without `EXCLUDED_FOLDERS` and `EXCLUDED_PATTERNS`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in _python_files(root) if _in_library(p.relative_to(root))]
    if not files:
        raise DataError(
            f"the standard library at {root} holds no .py files; give data.path=, a file or folder"
        )
    return TextSource(f"standard library of Python {platform.python_version()}", root, _sorted(files, root))


def file_fraction(content: bytes) -> float:
    """A number in [0, 1) that depends on the content alone: equal files fall on the same side of a split."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


def _python_files(root: Path) -> Iterator[Path]:
    """`.py` files below `root`; excluded folders are not entered: site-packages can be huge."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _in_library(relative: Path) -> bool:
    names = (relative.as_posix(), relative.parts[0])
    return not any(fnmatch(name, pattern) for name in names for pattern in EXCLUDED_PATTERNS)


def _sorted(files: list[Path], root: Path) -> list[Path]:
    return sorted(files, key=lambda p: p.relative_to(root).as_posix())


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in relative.parts)


def _is_binary(path: Path) -> bool:
    with path.open("rb") as stream:
        return b"\0" in stream.read(8192)
