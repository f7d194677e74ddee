"""prepare_data: what it writes trains like the text itself, and one line for each wrong input."""

from __future__ import annotations

import gzip
import hashlib
import json

import numpy as np
import pytest
import torch

from moonep.command import command
from moonep.errors import CapabilityError, DataError
from moonep.trainer.data import BatchStream, DataConfig, build_corpus
from tools.prepare_data import PrepareConfig, PrepareSource
from tools.prepare_data import run as prepare


def prepared(tmp_path, source, **options):
    data = PrepareSource(path=str(source), validation_fraction=0.4)
    manifest = prepare(PrepareConfig(data=data, out=str(tmp_path / "out"), **options))
    return manifest, build_corpus(DataConfig(path=str(tmp_path / "out")))


@pytest.mark.parametrize("shard_tokens", [1 << 20, 100])
def test_bytes_equal_the_text_read_directly(tmp_path, corpus_folder, shard_tokens):
    manifest, corpus = prepared(tmp_path, corpus_folder, shard_tokens=shard_tokens)
    direct = build_corpus(DataConfig(path=str(corpus_folder), validation_fraction=0.4))
    for name in ("train", "val"):
        ours, theirs = corpus.split(name), direct.split(name)
        assert np.array_equal(ours.window(0, len(ours)), theirs.window(0, len(theirs)))
        assert np.array_equal(ours.document_starts, theirs.document_starts)
        assert ours.text_bytes == theirs.text_bytes
        assert (len(manifest["splits"][name]["shards"]) > 1) == (shard_tokens == 100)
    streams = [BatchStream(c.split("train"), context=32, micro_batch=4) for c in (corpus, direct)]
    for _ in range(5):
        a, b = (stream.next() for stream in streams)
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)


def test_manifest_checksums_are_those_of_the_files(tmp_path, corpus_folder):
    manifest, _ = prepared(tmp_path, corpus_folder, shard_tokens=1000)
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            content = (tmp_path / "out" / shard["file"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == shard["sha256"]


def test_bpe_inverts_and_shortens(tmp_path, corpus_folder):
    manifest, corpus = prepared(tmp_path, corpus_folder, tokenizer="bpe", vocab_size=300)
    split = corpus.split("val")
    assert manifest["dtype"] == "uint16" and corpus.vocab_size <= 300
    assert len(split) < 0.6 * split.text_bytes and corpus.bytes_per_token > 1.6
    first, second = split.document_starts[:2]
    contents = {path.read_text() for path in corpus_folder.iterdir()}
    assert corpus.decode(split.window(first, second - first)) in contents


def test_characters_and_a_single_file(tmp_path):
    (tmp_path / "one.txt").write_text("abcde" * 100)
    _, corpus = prepared(tmp_path, tmp_path / "one.txt", tokenizer="characters")
    assert corpus.vocab_size == 6 and len(corpus.split("train")) == 301 and len(corpus.split("val")) == 201


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".ndjson"])
def test_json_lines_hold_a_document_a_line(tmp_path, suffix):
    rows = "".join(json.dumps({"content": f"document {i}" * (i % 3)}) + "\n" for i in range(30)) + "\n"
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(rows.encode()) if suffix.endswith("gz") else rows.encode())
    manifest, corpus = prepared(tmp_path, path, text_field="content")
    counts = [split["documents"]["count"] for split in manifest["splits"].values()]
    assert sum(counts) == 20 and min(counts) > 0
    assert corpus.decode(corpus.split("train").window(0, 12)).startswith("document")


def test_json_errors_name_file_line_and_fields(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"body": "b"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2 has no text in 'text' \(it has: body\)"):
        prepared(tmp_path, path)
    path.write_text('{"text": "a"}\n{oops\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2 is not JSON"):
        prepared(tmp_path, path)
    path.with_name("rows.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-9])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz is damaged"):
        prepared(tmp_path, path.with_name("rows.jsonl.gz"))
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_parquet_is_read_or_its_package_named(tmp_path):
    path = tmp_path / "rows.parquet"
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(CapabilityError, match="pip install pyarrow"):
            prepared(tmp_path, path)
        return
    parquet.write_table(pa.table({"text": [f"row {i}" for i in range(20)], "id": range(20)}), path)
    manifest, _ = prepared(tmp_path, path)
    assert sum(split["documents"]["count"] for split in manifest["splits"].values()) == 20


def test_a_damaged_folder_is_refused(tmp_path, corpus_folder):
    prepared(tmp_path, corpus_folder)
    out = tmp_path / "out"
    shard = out / "train_00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train_00000\.bin has \d+ bytes, the manifest says"):
        build_corpus(DataConfig(path=str(out)))
    (out / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match=r"manifest\.json is no token manifest"):
        build_corpus(DataConfig(path=str(out)))


def test_tokenizer_of_a_prepared_folder_cannot_be_changed(tmp_path, corpus_folder):
    prepared(tmp_path, corpus_folder)
    with pytest.raises(DataError, match="prepared with tokenizer bytes"):
        build_corpus(DataConfig(path=str(tmp_path / "out"), tokenizer="characters"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "out= is not set"),
        (["out=OUT", "data.path=/nowhere"], "data.path=/nowhere"),
        (["out=OUT", "tokenizer=words"], "tokenizer=words"),
        (["out=OUT", "data.validation_fraction=1"], "data.validation_fraction=1"),
        (["out=OUT", "shard_tokens=0"], "shard_tokens=0"),
        (["out=OUT", "data.path=DATA", "tokenizer=bpe", "vocab_size=100"], "vocab_size=100"),
        (["out=OUT", "data.path=DATA", "data.pattern=*.rst"], "data.pattern"),
        (["out=OUT", "vocabsize=1000"], "did you mean 'vocab_size'"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(tmp_path, corpus_folder, capsys, words, named):
    words = [w.replace("OUT", str(tmp_path / "new")).replace("DATA", str(corpus_folder)) for w in words]
    with pytest.raises(SystemExit) as stop:
        command(prepare, "prepare_data", PrepareConfig, words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and named in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_an_existing_folder_is_never_overwritten(tmp_path, corpus_folder, capsys):
    prepared(tmp_path, corpus_folder)
    with pytest.raises(SystemExit) as stop:
        command(
            prepare, "prepare_data", PrepareConfig, [f"data.path={corpus_folder}", f"out={tmp_path / 'out'}"]
        )
    assert stop.value.code == 2 and "is not an empty folder" in capsys.readouterr().err
