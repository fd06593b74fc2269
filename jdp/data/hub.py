"""Data sets of the Hugging Face hub, or in its formats on a disk, as Arrow tables: one for each split.

`datasets` keeps them as Arrow files in its cache, mapped into memory: nothing is read before it is needed. It runs no
code of a data set (scripts ended with its version 4), and neither do we.
"""

from pathlib import Path
from typing import Any

from jdp.data.optional import optional

HF = "hf:"


def hub_splits(source: str) -> dict[str, Any]:
    """Split -> `pyarrow.Table`, mapped into memory.

    Args:
      source: "hf:NAME", "hf:OWNER/NAME" or "hf:OWNER/NAME/CONFIG" on the hub; or "hf:PATH" of a directory that
        `save_to_disk` wrote, or of any files that `datasets.load_dataset` takes, or of one such file. With ":SPLIT"
        after it ("hf:OWNER/NAME:train[:10%]") that split alone, else every one there is.

    Raises:
      ValueError: `datasets` is not installed; a data set or a split that is not there or cannot be read.
    """
    datasets = optional("datasets", source)
    name, split = _parted(source)
    try:
        loaded = _load(datasets, name, split)
    except Exception as error:  # network, permissions, builders: each raises its own kinds
        words = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ValueError(
            f"a Hugging Face data set must be readable, got {source}: {words}; mend its name or path, or log "
            "in to the hub"
        ) from error
    found = loaded if isinstance(loaded, dict) else {split or "train": loaded}
    return {str(split): _table(data) for split, data in found.items()}


def hub_table(source: str) -> tuple[Any, str]:
    """The one split that is meant, as a `pyarrow.Table`, and its name: the one given, else "train", else the only one.

    Raises:
      ValueError: see `hub_splits`; several splits and none of them "train".
    """
    splits = hub_splits(source)
    if "train" not in splits and len(splits) > 1:
        raise ValueError(
            f"a data set must have the split train, or one only, got {', '.join(splits)} in {source}: "
            f"name the one that is meant, as {source}:{next(iter(splits))}"
        )
    name = "train" if "train" in splits else next(iter(splits))
    return splits[name], name


def _parted(source: str) -> tuple[str, str | None]:
    """The name or path, and the split. A path that is there is a path, whatever is in its name."""
    whole = source.removeprefix(HF)
    if Path(whole).expanduser().exists():
        return whole, None
    name, _, split = whole.partition(":")
    return name, split or None


def _load(datasets: Any, name: str, split: str | None) -> Any:
    """A data set, or a dict of them by split."""
    path = Path(name).expanduser()
    if (path / "dataset_dict.json").exists():
        return _pick(datasets.load_from_disk(str(path)), split)
    if (path / "dataset_info.json").exists() and (path / "state.json").exists():
        return _pick({"train": datasets.load_from_disk(str(path))}, split)
    if path.is_file():
        return datasets.load_dataset(str(path.parent), data_files=path.name, split=split)
    if path.exists() or path.is_absolute():
        return datasets.load_dataset(str(path), split=split)
    owner_and_name, config = name.split("/")[:2], name.split("/")[2:]
    return datasets.load_dataset("/".join(owner_and_name), *config[:1], split=split)


def _pick(splits: dict[str, Any], split: str | None) -> Any:
    if split is not None and split not in splits:
        raise ValueError(f'unknown split "{split}", there are {", ".join(splits)}')
    return splits if split is None else splits[split]


def _table(data: Any) -> Any:
    # Rows that were selected or shuffled are a list of places beside the table: made a table of their own here.
    plain = data.flatten_indices() if data._indices is not None else data
    return plain.data.table.replace_schema_metadata(plain.features.arrow_schema.metadata)
