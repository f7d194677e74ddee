"""From `configs/` and the command line to typed dataclasses, with errors of one line.

The only file that touches Hydra and omegaconf. Each override is checked against the schema first, so that a
typo gets the nearest key or value and not Hydra's advice to add it with `+`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from moonep.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
T = TypeVar("T")


def did_you_mean(word: str, allowed: Iterable[str], *, limit: int = 12) -> str:
    """`; did you mean 'x'?`, or the allowed words when none is near and they are few."""
    words = sorted(set(allowed))
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; allowed: {', '.join(words)}" if len(words) <= limit else ""


def _leaf_keys(node: Any, prefix: str = "") -> list[str]:
    """Dotted keys of a structured config, inner nodes included."""
    from omegaconf import DictConfig, OmegaConf

    keys = []
    for name in node:
        path = f"{prefix}{name}"
        keys.append(path)
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and OmegaConf.is_dict(child):
            keys += _leaf_keys(child, f"{path}.")
    return keys


def _nearest_key(key: str, allowed: Sequence[str]) -> str:
    """Hint for an unknown dotted key: the same last word elsewhere, else the nearest spelling."""
    last = key.rsplit(".", 1)[-1]
    same = [k for k in allowed if k.rsplit(".", 1)[-1] == last]
    if same:
        return f"; did you mean {same[0]!r}?"
    hint = did_you_mean(key, allowed, limit=0)
    if hint:
        return hint
    near = difflib.get_close_matches(last, [k.rsplit(".", 1)[-1] for k in allowed], n=1, cutoff=0.7)
    if near:
        full = next(k for k in allowed if k.rsplit(".", 1)[-1] == near[0])
        return f"; did you mean {full!r}?"
    parent = key.rsplit(".", 1)[0] + "." if "." in key else ""
    siblings = [k for k in allowed if k.startswith(parent) and "." not in k[len(parent) :]]
    return f"; known keys: {', '.join(siblings)}" if siblings else ""


class _Checker:
    """Checks single overrides against schema and groups; each failure is one ConfigError."""

    def __init__(self, schema: type, config_dirs: Sequence[Path], primary: str):
        from omegaconf import OmegaConf

        self.schema = OmegaConf.structured(schema)
        self.keys = _leaf_keys(self.schema)
        self.groups: dict[str, list[str]] = {}
        text = (CONFIG_DIR / f"{primary}.yaml").read_text()
        named = set(re.findall(r"^\s*-\s*(?:optional\s+)?(\w+):", text, re.M))
        for root in config_dirs:
            for folder in sorted(p for p in root.iterdir() if p.is_dir() and p.name in named):
                options = [f.stem for f in sorted(folder.glob("*.yaml"))]
                self.groups[folder.name] = self.groups.get(folder.name, []) + options

    def check(self, text: str) -> str:
        """Returns the override in the form Hydra takes (a `+` before a known key is dropped).

        Raises:
            ConfigError: unreadable, unknown key, unknown group choice, or a value of the wrong type.
        """
        override = self.parse(text)
        key = override.key_or_group
        if override.is_sweep_override():
            raise ConfigError(f"{text!r} asks for several runs; give one value and start one run for each")
        if override.is_delete():
            raise ConfigError(f"{text!r}: keys cannot be deleted; set {key}=null where the key allows it")
        if key.startswith("hydra"):
            raise ConfigError(f"{text!r}: hydra.* keys do nothing here; run.dir=PATH names the run's folder")
        if key in self.groups:
            return self._check_group(text, key, override.value())
        if key not in self.keys and not self._inside_free_dict(key):
            hint = _nearest_key(key, sorted({*self.keys, *self.groups}))
            raise ConfigError(f"unknown key {key!r}{hint}")
        self._check_type(key, override.value())
        return f"+{text.lstrip('+')}" if self._inside_free_dict(key) else text.lstrip("+")

    def is_shadowed(self, text: str) -> bool:
        """Whether Hydra would take a plain key (a tool's `checkpoint=PATH`) for a config group."""
        key = self.parse(text).key_or_group
        return key in self.keys and key not in self.groups and (CONFIG_DIR / key).is_dir()

    def parse(self, text: str) -> Any:
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        try:
            return OverridesParser.create().parse_override(text)
        except HydraException:
            pass
        if "=" not in text:
            for group, options in self.groups.items():
                if text in options:
                    raise ConfigError(f"cannot read {text!r}: write key=value; did you mean {group}={text}?")
            example = f"{text}=true" if text in self.keys else "train.steps=100"
            raise ConfigError(f"cannot read {text!r}: write key=value, for instance {example}")
        raise ConfigError(f"cannot read {text!r}: put the value in quotes, for instance 'key=\"a value\"'")

    def _check_group(self, text: str, group: str, value: Any) -> str:
        from omegaconf import OmegaConf

        if isinstance(value, (dict, list)):
            raise ConfigError(f"{group} is a config group: write {group}=NAME or {group}.KEY=VALUE")
        name = "null" if value is None else str(value)
        if name not in [*self.groups[group], "null"]:
            raise ConfigError(f"{group}={name}: no such choice{did_you_mean(name, self.groups[group])}")
        if value is None and group in self.schema and OmegaConf.is_config(self.schema._get_node(group)):
            raise ConfigError(f"{group}=null: choose one of {', '.join(self.groups[group])}")
        return text.lstrip("+")

    def _inside_free_dict(self, key: str) -> bool:
        """Whether `key` lies in a dict[str, Any] of the schema, whose keys are the user's."""
        parts = key.split(".")
        return any(".".join(parts[:i]) in self._free_dicts() for i in range(1, len(parts)))

    def _free_dicts(self) -> list[str]:
        from omegaconf import DictConfig, OmegaConf

        nodes = ((k, OmegaConf.select(self.schema, k)) for k in self.keys if "${" not in k)
        return [k for k, node in nodes if isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict]

    def _check_type(self, key: str, value: Any) -> None:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if isinstance(value, str) and "${" in value:
            return
        try:
            OmegaConf.update(self.schema.copy(), key, value, force_add=self._inside_free_dict(key))
        except OmegaConfBaseException as error:
            shown = "null" if value is None else value
            raise ConfigError(f"{key}={shown}: {_type_message(error)}") from None


def _type_message(error: BaseException) -> str:
    """The first line of omegaconf's message, in the project's words."""
    line = str(error).splitlines()[0]
    kind = re.search(r"could not be converted to (\w+)", line)
    if kind:
        names = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false"}
        return f"must be {names.get(kind.group(1), kind.group(1))}"
    if "valid bool" in line:
        return "must be true or false"
    if "is not a subclass of" in line:
        return "is a group of keys: write GROUP.KEY=VALUE, or GROUP=NAME for a file of configs/GROUP/"
    if "is not Optional" in line:
        return "must not be null"
    if "BaseContainer" in line or "Cannot assign" in line or "Invalid value assigned" in line:
        return "holds several keys or a list; a single value does not fit"
    return line


def _parse_flags(argv: Sequence[str]) -> tuple[list[str], list[Path], str | None]:
    """Splits the command line into overrides, extra config folders, and a request (help, cfg)."""
    overrides, folders, request = [], [], None
    words = iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if name in ("--config-dir", "-cd"):
            folder = Path(value or next(words, "")).resolve()
            if not folder.is_dir():
                raise ConfigError(f"--config-dir {folder}: no such folder")
            folders.append(folder)
        elif word in ("--help", "-h"):
            request = "help"
        elif name in ("--cfg", "-c"):
            request = value or next(words, "job")
        elif word == "--resolve":
            continue
        elif word in ("-m", "--multirun"):
            raise ConfigError("-m: one run at a time; start one command for each value")
        elif word.startswith("-") and "=" not in word.lstrip("-")[:1]:
            plain = word.lstrip("-").replace("-", "_")
            plain += "" if value else "=true"
            raise ConfigError(f"{word}: options are written key=value; did you mean {plain}?")
        else:
            overrides.append(word)
    return overrides, folders, request


def compose(primary: str, schema: type[T], argv: Sequence[str] = ()) -> tuple[T, str | None]:
    """Reads `configs/PRIMARY.yaml` (whose defaults list starts with PRIMARY_schema) with overrides.

    Args:
        primary: name of the primary config.
        schema: its dataclass.
        argv: overrides, `--config-dir DIR` (one more folder of configs), `--help`, `--cfg job`.

    Returns:
        an instance of `schema`, and "help" or "job" if the command line asked to print instead of to run.

    Raises:
        ConfigError: one line, naming the key or file, what came, what is allowed.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    overrides, folders, request = _parse_flags(argv)
    checker = _Checker(schema, [CONFIG_DIR, *folders], primary)
    checked = [checker.check(word) for word in overrides]
    plain = [word for word in checked if checker.is_shadowed(word)]
    if folders:
        checked.append("hydra.searchpath=[" + ",".join(f"file://{f}" for f in folders) + "]")
    ConfigStore.instance().store(name=f"{primary}_schema", node=schema)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            config = hydra_compose(primary, [word for word in checked if word not in plain])
        for word in plain:
            override = checker.parse(word)
            OmegaConf.update(config, override.key_or_group, override.value())
        OmegaConf.resolve(config)
        result = OmegaConf.to_object(config)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(_explain(error, checker)) from None
    assert dataclasses.is_dataclass(result)
    return result, request  # type: ignore[return-value]


def _explain(error: BaseException, checker: _Checker) -> str:
    """One line for an error found inside the YAML files themselves."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    where = re.search(r"In '([^']+)'", str(error))
    place = f"{where.group(1)}: " if where else ""
    for link in chain:
        missing = re.search(r"Could not find '(\w+)/([^']+)'", str(link))
        if missing and missing.group(1) in checker.groups:
            group, name = missing.groups()
            return f"{place}{group}={name}: no such choice{did_you_mean(name, checker.groups[group])}"
    keyed = [link for link in chain if getattr(link, "full_key", None)]
    if not keyed:
        return place + " ".join(str(chain[-1]).split())
    key, line = keyed[0].full_key, str(keyed[0]).splitlines()[0]  # type: ignore[attr-defined]
    if "not in" in line:
        return f"{place}unknown key {key!r}{_nearest_key(key, checker.keys)}"
    return f"{place}{key}: {_type_message(keyed[0])}"
