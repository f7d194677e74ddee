"""Documents out of text files, JSON Lines and Parquet, one at a time: what `tools.prepare_data` tokenizes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from moonep.errors import CapabilityError, DataError

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson")


def read_documents(path: Path, field: str) -> Iterator[str]:
    """Texts of one file, empty ones left out.

    Args:
        path: `.jsonl`, `.jsonl.gz`, `.ndjson` and `.parquet` hold one document a row; any other file is one
        document.
        field: the field of a JSON object, or the Parquet column, that holds the text.

    Raises:
        DataError: not UTF-8, not JSON, or without the field; names file and line.
        CapabilityError: Parquet without pyarrow.
    """
    if path.name.endswith(JSON_SUFFIXES):
        texts = _json_lines(path, field)
    elif path.suffix == ".parquet":
        texts = _parquet(path, field)
    else:
        texts = iter([_whole_file(path)])
    return (text for text in texts if text)


def holds_rows(path: Path) -> bool:
    """Whether a file holds many documents."""
    return path.name.endswith((*JSON_SUFFIXES, ".parquet"))


def _whole_file(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); leave it out by data.pattern=") from None


def _json_lines(path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number} is not JSON ({error})") from None
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise DataError(f"{path}:{number} has no text in {field!r} (it has: {keys}); set text_field=")
        yield row[field]


def _lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as stream:
            yield from stream
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged or not UTF-8 text ({error})") from None


def _parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise CapabilityError(
            f"reading {path} needs pyarrow (pip install pyarrow); .jsonl files need nothing"
        ) from None
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow raises many kinds for a file that is not Parquet
        raise DataError(f"{path} is not a Parquet file ({error})") from None
    if field not in file.schema_arrow.names:
        raise DataError(
            f"{path} has no column {field!r} (it has: {', '.join(file.schema_arrow.names)}); set text_field="
        )
    for batch in file.iter_batches(columns=[field]):
        yield from (text for text in batch.column(0).to_pylist() if text)
