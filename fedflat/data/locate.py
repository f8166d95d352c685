"""Find a data set: a path, a folder under ``$FEDFLAT_DATA``, or the Hugging Face hub, in this order."""

from __future__ import annotations

import codecs
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError, RunError, nearest, wrong
from fedflat.core.imports import hub
from fedflat.data.encoding import clean
from fedflat.data.preparation import DATASETS, Source

SPLITS = ("train", "test", "validation")
COMMAS = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
SHEETS = (".xlsx", ".xls")
FILES = (".parquet", *COMMAS, *SHEETS)
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
TABLES = "a parquet, CSV (.csv, .tsv, also .gz) or Excel file"


@dataclasses.dataclass(frozen=True)
class Split:
    """One split: its files (the cache key of what is decoded), its features, and how to read some of its columns."""

    where: str
    files: tuple[Path, ...]
    features: Any  # datasets.Features: column name -> feature
    read: Callable[[list[str]], Any]  # column names -> pyarrow.Table

    @property
    def csv(self) -> bool:
        """Whether it is a table without types of its own."""
        return bool(self.files) and ending_of(self.files[0]) in (*COMMAS, *SHEETS)

    def values(self, column: str) -> list[Any]:
        """Return one column as Python values."""
        return list(self.read([column]).column(column).to_pylist())


@dataclasses.dataclass(frozen=True)
class Written:
    """How CSV files are written: what stands between two values (None: by the file's ending), and their encoding."""

    separator: str | None = None
    encoding: str | None = None


def ending_of(path: Path) -> str:
    """Return which of ``FILES`` a file's name ends with, or the empty string."""
    name = path.name.lower()
    return next((ending for ending in FILES if name.endswith(ending)), "")


def locate(
    dataset: str, written: Written = Written(), key: str = "data.dataset"
) -> tuple[str, Source | None, dict[str, Split]]:
    """``(name, what the table knows of it, splits)`` of ``data.dataset``. key: the setting that messages name.

    A folder named like a data set of the table is taken to be that data set. Raises InputError for an unknown
    name or a path without data, RunError when only the hub could have it and the hub cannot be reached.
    """
    path = Path(dataset).expanduser()
    if is_path(dataset):
        name = path.name[: -len(ending_of(path))] if ending_of(path) else path.resolve().name
        return name, DATASETS.get(name), _files_of(path, dataset, written, key)
    name, source = _known(dataset, key)
    folder = Path(os.environ["FEDFLAT_DATA"]).expanduser() / name if os.environ.get("FEDFLAT_DATA") else None
    if folder is not None and folder.is_dir():
        return name, source, _files_of(folder, str(folder), written, key)
    hub, config = (source.hub, source.config) if source else (dataset, None)
    return name, source, _from_hub(dataset, hub, config, folder)


def is_path(dataset: str) -> bool:
    """Return whether a data set is named by its file or folder: one's own then, whatever it is called."""
    path = Path(dataset).expanduser()
    # A folder of a published set's name in the working directory is written ./name.
    named = dataset in DATASETS or dataset == "digits"
    return not named and (bool(ending_of(path)) or path.exists() or dataset.startswith((".", "/", "~")))


def _known(dataset: str, key: str) -> tuple[str, Source | None]:
    """Return the short name and table entry of a short name or hub id."""
    if dataset in DATASETS:
        return dataset, DATASETS[dataset]
    owner, slash, rest = dataset.partition("/")
    if owner and slash and rest and "/" not in rest:
        # one hub id may serve several names (GLUE): then the id alone does not say which
        same = [name for name, source in DATASETS.items() if source.hub == dataset]
        return (same[0], DATASETS[same[0]]) if len(same) == 1 else (rest, None)
    allowed = f"{', '.join(DATASETS)}, a hub id owner/name, or the path of a parquet or CSV file or folder"
    raise wrong(key, dataset, allowed, hint=nearest(dataset, DATASETS))


def _files_of(path: Path, shown: str, written: Written, key: str) -> dict[str, Split]:
    if path.is_file():
        return {"train": _open((path,), written, key)}
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(path, key)
    found = {split: _files(path, split) for split in SPLITS}
    splits = {split: _open(files, written, key) for split, files in found.items() if files}
    if not splits and (pictures := sorted(p for p in path.rglob("*") if p.suffix.lower() in PICTURES)):
        return {"train": _pictures(path, tuple(pictures), key)}
    if not splits:
        beside = sorted(p.name for p in path.iterdir() if ending_of(p)) if path.is_dir() else []
        state = "a folder without parquet or CSV files" if path.is_dir() else "no such file or folder"
        allowed = (
            f"{TABLES}, a folder with train*.parquet or train*.csv (and test*), a saved Hugging Face data set, or "
        )
        allowed += "a folder of images, USER/CLASS/FILE"
        raise wrong(key, f"{shown} ({state})", allowed, hint=f"Did you mean {path / beside[0]}?" if beside else "")
    return splits


def _files(folder: Path, split: str) -> tuple[Path, ...]:
    """Return the files ``split*.parquet``, else ``split*.csv``, in the folder, or in its ``data`` folder as the hub
    lays them.
    """
    for ending in FILES:
        found = sorted(folder.glob(f"{split}*{ending}")) or sorted((folder / "data").glob(f"{split}*{ending}"))
        if found:
            return tuple(found)
    return ()


def _saved(path: Path, key: str) -> dict[str, Split]:
    """Return the splits of a data set that Hugging Face's ``save_to_disk`` wrote."""
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise wrong(key, f"{path} ({_reason(error)})", "a folder that save_to_disk wrote") from None
    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    return {name: _hub_split(f"{path}/{name}", split) for name, split in splits.items() if name in SPLITS}


def _pictures(folder: Path, files: tuple[Path, ...], key: str) -> Split:
    """Return a folder USER/CLASS/FILE (or USER/FILE) as a table of user, label and image."""
    import pyarrow as pa
    from datasets import Features, Image, Value

    parts = [file.relative_to(folder).parts for file in files]
    depth = {len(part) for part in parts}
    if depth not in ({2}, {3}):
        odd = next((part for part in parts if len(part) not in (2, 3)), parts[-1])
        raise wrong(key, f"{folder} with {'/'.join(odd)}", "images as USER/CLASS/FILE, or all as USER/FILE")
    columns = {"user": [part[0] for part in parts]} | ({"label": [part[1] for part in parts]} if depth == {3} else {})
    features = Features({**{name: Value("string") for name in columns}, "image": Image()})

    def read(names: list[str]) -> Any:
        found: dict[str, Any] = {name: columns[name] for name in names if name in columns}
        if "image" in names:
            found["image"] = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
        return pa.table({name: found[name] for name in names})

    return Split(str(folder), files, features, read)


def _open(files: tuple[Path, ...], written: Written, key: str) -> Split:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features

    ending = ending_of(files[0])
    if written != Written() and ending not in COMMAS:
        raise wrong("data.separator or data.encoding", "a value", f"nothing: {files[0].name} is no CSV file")

    def whole(file: Path, columns: list[str] | None) -> Any:
        if ending in COMMAS:
            return _commas(file, written)
        return _sheet(file) if ending in SHEETS else pq.read_table(file, columns=columns)

    try:
        first = None if ending not in (*COMMAS, *SHEETS) else whole(files[0], None)
        schema = pq.read_schema(files[0]) if first is None else first.schema
        names = _clean_names(schema.names, files[0], key)
        features = Features({names[name]: of for name, of in Features.from_arrow_schema(schema).items()})
    except (OSError, pa.ArrowException, ValueError, KeyError, UnicodeError) as error:
        if isinstance(error, InputError):
            raise
        raise wrong(key, f"{files[0]} ({_reason(error)})", f"a readable file: {TABLES}", hint=_way(error)) from None

    def read(columns: list[str]) -> Any:
        asked = [original for original, name in names.items() if name in columns]
        try:
            tables = [whole(file, asked) for file in files]
            found = pa.concat_tables([table.select(asked) for table in tables], promote_options="permissive")
            return found.rename_columns([names[name] for name in found.column_names])
        except (OSError, pa.ArrowException, KeyError, UnicodeError) as error:
            allowed = "readable files of one schema"
            raise wrong(key, f"{files[0]} ({_reason(error)})", allowed, hint=_way(error)) from None

    return Split(str(files[0]), files, features, read)


def _commas(file: Path, written: Written) -> Any:
    import pyarrow.csv as pc

    tabs = ".tsv" in file.name.lower()
    mark = written.separator or ("\t" if tabs else ",")
    mark = {"tab": "\t", "\\t": "\t"}.get(mark, mark)
    if len(mark) != 1:
        raise wrong("data.separator", mark, "one sign, or tab")
    form = pc.ParseOptions(delimiter=mark, newlines_in_values=True)
    found = pc.read_csv(file if written.encoding is None else _in_utf8(file, written.encoding), parse_options=form)
    # One column whose name has a separator in it was cut at the wrong sign.
    if len(found.column_names) == 1 and written.separator is None:
        for other, name in ((";", ";"), ("\t", "tab"), ("|", "|")):
            if other in found.column_names[0]:
                allowed = "columns with commas between them"
                raise wrong("data.separator", f"one column, {found.column_names[0]!r}", allowed,
                            hint=f"Set data.separator='{name}', or --separator '{name}'.")  # fmt: skip
    return found


def _in_utf8(file: Path, encoding: str) -> Any:
    """Return a CSV file's text in UTF-8. pyarrow's own conversion leaves threads that abort the process at its end."""
    import pyarrow as pa

    try:
        codecs.lookup(encoding)
    except LookupError:
        known = ("utf-8", "latin-1", "cp1252", "utf-16")
        raise wrong("data.encoding", encoding, "latin-1, cp1252 or another that Python knows",
                    hint=nearest(encoding, known)) from None  # fmt: skip
    with pa.input_stream(str(file)) as stream:  # it unpacks .gz too
        return pa.BufferReader(stream.read().decode(encoding).encode())


def _sheet(file: Path) -> Any:
    """Return the first sheet of an Excel file; pandas reads it with openpyxl."""
    import pandas as pd
    import pyarrow as pa

    try:
        return pa.Table.from_pandas(pd.read_excel(file), preserve_index=False)
    except ImportError as error:
        package = "xlrd" if "xlrd" in str(error) else "openpyxl"
        raise wrong("data.dataset", f"{file}, and {package}, which reads it, is not installed",
                    f"pip install {package}, or the table saved as CSV") from None  # fmt: skip


def _clean_names(found: list[str], file: Path, key: str) -> dict[str, str]:
    """Every column's name as it is in the file -> without blanks around it."""
    names = {name: clean(name) for name in found}
    for place, name in enumerate(found):
        for other in found[:place]:
            if clean(other) == clean(name):
                raise wrong(key, f"two columns called {clean(name)} in {file}", "columns with different names")
    return names


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _way(error: Exception) -> str:
    """Return a hint for what CSV readers stumble over."""
    said = str(error)
    if "UTF" in said or "decode" in said:
        return "Another encoding, such as latin-1 or cp1252, is data.encoding, or --encoding."
    return (
        "Another separator is data.separator, or --separator; or a row has another number of values."
        if "columns, got" in said
        else ""
    )


def _from_hub(dataset: str, owner: str, config: str | None, folder: Path | None) -> dict[str, Split]:
    """Return the splits from the hub (or from the hub client's own cache when offline)."""
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
    names = _clean_names(list(split.features), Path(where), "data.dataset")
    split = split.rename_columns({old: new for old, new in names.items() if old != new})
    return Split(where, files, split.features, lambda columns: split.select_columns(columns).with_format("arrow")[:])
