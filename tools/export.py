"""Writes a checkpoint's model under the names of the released Hugging Face checkpoint, as safetensors:

python -m tools.export checkpoint=runs/quickstart out=exported
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonep.command import bytes_text, command, table, write_json
from moonep.errors import ConfigError


@dataclass
class ExportConfig:
    """Keys of the command.

    Attributes:
        checkpoint: a run's folder (its newest checkpoint) or a step_N folder.
        out: folder to write; must be empty or new.
        dtype: bf16 | fp32, of the weights.
        shard_gb: largest file, in 1e9 bytes.
    """

    checkpoint: str | None = None
    out: str | None = None
    dtype: str = "bf16"
    shard_gb: float = 5.0


def run(config: ExportConfig) -> list[Path]:
    """Prints and returns the files written."""
    from model.huggingface import save_pretrained
    from moonep.trainer.checkpoint_model import choose_dtype, load_model

    if config.out is None:
        raise ConfigError("out= is not set; name a folder for the exported model")
    folder = Path(config.out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"out={config.out} is not an empty folder; name a new one")
    if not config.shard_gb > 0:
        raise ConfigError(f"shard_gb={config.shard_gb} must be above 0")
    loaded = load_model(config.checkpoint, dtype=choose_dtype(config.dtype))
    files = save_pretrained(loaded.model, folder, int(config.shard_gb * 1e9))
    files += _write_tokenizer(loaded.tokenizer.to_dict(), folder)
    rows = [(path.name, bytes_text(path.stat().st_size)) for path in files]
    print(table(f"{loaded.path} -> {folder}", ("file", "size"), rows))
    return files


def _write_tokenizer(described: dict, folder: Path) -> list[Path]:
    """`tokenizer.json` for BPE, which the `tokenizers` package reads; the other kinds in our own words."""
    if described["kind"] == "bpe":
        return [write_json(folder / "tokenizer.json", described["tokenizer"])]
    return [write_json(folder / "moonep_tokenizer.json", described)]


if __name__ == "__main__":
    command(run, "export", ExportConfig)
