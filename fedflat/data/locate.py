"""Where a data set is: a path, a folder under ``$FEDFLAT_DATA``, or the Hugging Face hub, in this order."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError, RunError, nearest, wrong
from fedflat.core.hub import hub
from fedflat.data.catalog import DATASETS, Source

SPLITS = ("train", "test", "validation")
FILES = (".parquet", ".csv")


@dataclasses.dataclass(frozen=True)
class Split:
    """One split: its files (the cache key of what is decoded), its features, and how to read some of its columns."""

    where: str
    files: tuple[Path, ...]
    features: Any  # datasets.Features: column name -> feature
    read: Callable[[list[str]], Any]  # column names -> pyarrow.Table

    def values(self, column: str) -> list[Any]:
        """One column as Python values."""
        return list(self.read([column]).column(column).to_pylist())


def locate(dataset: str) -> tuple[str, Source | None, dict[str, Split]]:
    """``(name, what the table knows of it, splits)`` of ``data.dataset``.

    A folder named like a data set of the table is taken to be that data set. Raises InputError for an unknown
    name or a path without data, RunError when only the hub could have it and the hub cannot be reached.
    """
    path = Path(dataset).expanduser()
    plain = dataset in DATASETS  # a folder of that name in the working directory is written ./name
    if not plain and (path.suffix in FILES or path.exists() or dataset.startswith((".", "/", "~"))):
        name = path.stem if path.suffix in FILES else path.resolve().name
        return name, DATASETS.get(name), _files_of(path, dataset)
    name, source = _known(dataset)
    folder = Path(os.environ["FEDFLAT_DATA"]).expanduser() / name if os.environ.get("FEDFLAT_DATA") else None
    if folder is not None and folder.is_dir():
        return name, source, _files_of(folder, str(folder))
    hub, config = (source.hub, source.config) if source else (dataset, None)
    return name, source, _from_hub(dataset, hub, config, folder)


def _known(dataset: str) -> tuple[str, Source | None]:
    """Short name and table entry of a short name or hub id."""
    if dataset in DATASETS:
        return dataset, DATASETS[dataset]
    owner, slash, rest = dataset.partition("/")
    if owner and slash and rest and "/" not in rest:
        # one hub id may serve several names (GLUE): then the id alone does not say which
        same = [name for name, source in DATASETS.items() if source.hub == dataset]
        return (same[0], DATASETS[same[0]]) if len(same) == 1 else (rest, None)
    allowed = f"{', '.join(DATASETS)}, a hub id owner/name, or the path of a parquet or CSV file or folder"
    raise wrong("data.dataset", dataset, allowed, hint=nearest(dataset, DATASETS))


def _files_of(path: Path, shown: str) -> dict[str, Split]:
    if path.is_file():
        return {"train": _open((path,))}
    found = {split: _files(path, split) for split in SPLITS}
    splits = {split: _open(files) for split, files in found.items() if files}
    if not splits:
        state = "a folder without parquet or CSV files" if path.is_dir() else "no such file or folder"
        allowed = "a parquet or CSV file, or a folder with train*.parquet (and test*.parquet), or with train*.csv"
        raise wrong("data.dataset", f"{shown} ({state})", allowed)
    return splits


def _files(folder: Path, split: str) -> tuple[Path, ...]:
    """Files ``split*.parquet``, else ``split*.csv``, in the folder, or in its ``data`` folder as the hub lays them."""
    for ending in FILES:
        found = sorted(folder.glob(f"{split}*{ending}")) or sorted((folder / "data").glob(f"{split}*{ending}"))
        if found:
            return tuple(found)
    return ()


def _open(files: tuple[Path, ...]) -> Split:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq
    from datasets import Features

    csv, lines = files[0].suffix == ".csv", pa.csv.ParseOptions(newlines_in_values=True)

    def refused(error: Exception, allowed: str) -> InputError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        return wrong("data.dataset", f"{files[0]} ({reason})", allowed)

    try:
        schema = pa.csv.read_csv(files[0], parse_options=lines).schema if csv else pq.read_schema(files[0])
        features = Features.from_arrow_schema(schema)
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise refused(error, f"a readable {'CSV' if csv else 'parquet'} file") from None

    def read(columns: list[str]) -> Any:
        try:
            if not csv:
                return pa.concat_tables([pq.read_table(file, columns=columns) for file in files])
            only = pa.csv.ConvertOptions(include_columns=columns)
            read = [pa.csv.read_csv(file, parse_options=lines, convert_options=only) for file in files]
            return pa.concat_tables(read, promote_options="permissive")
        except (OSError, pa.ArrowException) as error:
            raise refused(error, "readable files of one schema") from None

    return Split(str(files[0]), files, features, read)


def _from_hub(dataset: str, owner: str, config: str | None, folder: Path | None) -> dict[str, Split]:
    """Splits from the hub (or from the hub client's own cache when offline)."""
    looked = f"{folder} (no such folder)" if folder else "FEDFLAT_DATA (not set)"
    remedy = (
        "Set FEDFLAT_DATA to a folder that holds one folder per data set, or give data.dataset=PATH of parquet or CSV "
        "files."
    )
    try:
        loaded = _download(owner, config)
    except Exception as error:  # the hub client raises many unrelated types; all mean: not to be had
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        place = f"{owner} ({config})" if config else owner
        message = (
            f"data.dataset: {dataset} not found: looked in {looked} and on the hub for {place}: {reason}. {remedy}"
        )
        if type(error).__name__ == "DatasetNotFoundError" and not _offline():
            raise InputError(message) from None
        raise RunError(message) from None
    return {name: _hub_split(f"{owner}/{name}", loaded[name]) for name in SPLITS if name in loaded}


def _download(name: str, config: str | None) -> Any:
    import datasets

    datasets.disable_progress_bars()
    with hub():
        return datasets.load_dataset(name, config)


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")


def _hub_split(where: str, split: Any) -> Split:
    files = tuple(Path(entry["filename"]) for entry in split.cache_files)
    return Split(where, files, split.features, lambda columns: split.select_columns(columns).with_format("arrow")[:])
