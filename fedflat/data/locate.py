"""Find a data set: a path, a folder under ``$FEDFLAT_DATA``, or the Hugging Face hub, in this order."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedflat.core import InputError, RunError, becoming, counted, first_line, hub, nearest, require, turning, wrong
from fedflat.data.encoding import clean, clean_names
from fedflat.data.preparation import DATASETS, Source

if TYPE_CHECKING:
    import pandas as pd

SPLITS = ("train", "test", "validation")
COMMAS = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
SHEETS = (".xlsx", ".xls")
FILES = (".parquet", *COMMAS, *SHEETS)
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
TABLES = "a parquet, CSV (.csv, .tsv, also .gz) or Excel file"
JSON = "pandas.read_json(FILE, lines=True).to_csv('FILE.csv', index=False) makes a table of it (.json: no lines=True)."
FOLDERS = (
    "a folder with train*.parquet or train*.csv (and test*), a saved Hugging Face data set, or a folder of images, "
    "USER/CLASS/FILE"
)


class Split(NamedTuple):
    """One split: its files (the cache key of what is decoded), its features, and how to read some of its columns."""

    where: str
    files: tuple[Path, ...]
    features: Any  # datasets.Features: column name -> feature
    read: Callable[[list[str]], Any]  # column names -> pyarrow.Table

    @property
    def csv(self) -> bool:
        """Whether it is a table without types of its own."""
        return bool(self.files) and ending_of(self.files[0]) in (*COMMAS, *SHEETS)

    def frame(self, columns: list[str]) -> pd.DataFrame:
        """Return some columns as a pandas table. Raises InputError where there is no row."""
        table = self.read(columns)
        require(table.num_rows > 0, self.where, "0 rows, with a header alone or blank lines below it", "at least one")
        return table.to_pandas()

    def values(self, column: str) -> list[Any]:
        """Return one column as Python values."""
        return list(self.read([column]).column(column).to_pylist())


class Written(NamedTuple):
    """How CSV files are written: what stands between two values (None: by the file's ending), their encoding, and the
    column of users, if it is known."""

    separator: str | None = None
    encoding: str | None = None
    by: str | None = None


USUAL = Written()


def ending_of(path: Path) -> str:
    """Return which of ``FILES`` a file's name ends with, or the empty string."""
    return next((ending for ending in FILES if path.name.lower().endswith(ending)), "")


def locate(
    dataset: str, written: Written = USUAL, key: str = "data.dataset", *, owned: bool = True
) -> tuple[str, Source | None, dict[str, Split]]:
    """``(name, what the table knows of it, splits)`` of ``data.dataset``. key: the setting that messages name.
    owned: whether images must lie in folders of users; rows to predict have none.

    A folder named like a data set of the table is taken to be that data set. Raises InputError for an unknown
    name or a path without data, RunError when only the hub could have it and the hub cannot be reached.
    """
    path = Path(dataset).expanduser()
    if is_path(dataset):
        name = path.name[: -len(ending_of(path))] if ending_of(path) else path.resolve().name
        return name, DATASETS.get(name), _files_of(path, dataset, written, key, owned)
    name, source = _look_up(dataset, key)
    folder = Path(os.environ["FEDFLAT_DATA"]).expanduser() / name if os.environ.get("FEDFLAT_DATA") else None
    if folder is not None and folder.is_dir():
        return name, source, _files_of(folder, str(folder), written, key)
    owner, config = (source.hub, source.config) if source else (dataset, None)
    return name, source, _from_hub(dataset, owner, config, folder)


def is_path(dataset: str) -> bool:
    """Return whether a data set is named by its file or folder: one's own then, whatever it is called."""
    path = Path(dataset).expanduser()
    # A folder of a published set's name in the working directory is written ./name.
    named = dataset in DATASETS or dataset == "digits"
    return not named and (bool(ending_of(path)) or path.exists() or dataset.startswith((".", "/", "~")))


def _look_up(dataset: str, key: str) -> tuple[str, Source | None]:
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


def _files_of(path: Path, display: str, written: Written, key: str, owned: bool = True) -> dict[str, Split]:
    if path.is_file():
        pictured = path.suffix.lower() in PICTURES
        return {"train": _pictures(path.parent, (path,), key, owned) if pictured else _open((path,), written, key)}
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(path, key)
    if splits := {split: _open(files, written, key) for split in SPLITS if (files := _files(path, split))}:
        return splits
    if pictures := sorted(p for p in path.rglob("*") if p.suffix.lower() in PICTURES):
        return {"train": _pictures(path, tuple(pictures), key, owned)}
    beside = sorted(p.name for p in path.iterdir() if ending_of(p)) if path.is_dir() else []
    state = "a folder without train*.parquet or train*.csv" if path.is_dir() else "no such file or folder"
    hint = f"Did you mean {path / beside[0]}?" if beside else ""
    raise wrong(key, f"{display} ({state})", f"{TABLES}, {FOLDERS}", hint=hint)


def _files(folder: Path, split: str) -> tuple[Path, ...]:
    """Return the files ``split*.parquet``, else ``split*.csv``, in the folder, or in its ``data`` folder as the hub
    lays them.
    """
    tries = (sorted(place.glob(f"{split}*{ending}")) for ending in FILES for place in (folder, folder / "data"))
    return tuple(next(filter(None, tries), ()))


def _saved(path: Path, key: str) -> dict[str, Split]:
    """Return the splits of a data set that Hugging Face's ``save_to_disk`` wrote."""
    import datasets

    allowed = "a folder that save_to_disk wrote"
    with becoming(lambda e: wrong(key, f"{path} ({first_line(e)})", allowed), (OSError, ValueError, KeyError)):
        loaded = datasets.load_from_disk(str(path))
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    return {name: _hub_split(f"{path}/{name}", split) for name, split in splits.items() if name in SPLITS}


def _pictures(folder: Path, files: tuple[Path, ...], key: str, owned: bool) -> Split:
    """Return a folder USER/CLASS/FILE (or USER/FILE) as a table of user, label and image; not ``owned``, of image."""
    import pyarrow as pa
    from datasets import Features, Image, Value

    parts = [file.relative_to(folder).parts for file in files]
    if owned and {len(part) for part in parts} not in ({2}, {3}):
        odd = next((part for part in parts if len(part) not in (2, 3)), parts[-1])
        raise wrong(key, f"{folder} with {'/'.join(odd)}", "images as USER/CLASS/FILE, or all as USER/FILE")
    columns = {name: list(values) for name, values in (zip(("user", "label"), (*zip(*parts),)[:-1]) if owned else ())}
    features = Features({**{name: Value("string") for name in columns}, "image": Image()})

    def read(names: list[str]) -> Any:
        table: dict[str, Any] = {name: columns[name] for name in names if name in columns}
        if "image" in names:
            table["image"] = [{"bytes": file.read_bytes(), "path": "/".join(part)} for file, part in zip(files, parts)]
        return pa.table({name: table[name] for name in names})

    return Split(str(folder), files, features, read)


def _open(files: tuple[Path, ...], written: Written, key: str) -> Split:
    """Return the split in files of one kind: a table's is read now, a parquet file's column by column."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features

    ending, first = ending_of(files[0]), files[0]
    if (written.separator or written.encoding) and ending not in COMMAS:
        raise wrong("data.separator or data.encoding", "a value", f"nothing: {first.name} is no CSV file")

    def joined(tables: Iterator[Any]) -> Any:
        return pa.concat_tables(tables, promote_options="permissive")

    if not ending or not first.stat().st_size:
        problem = f"{first}, {'an empty file' if ending else 'a file of another kind'}"
        raise wrong(key, problem, f"{TABLES}, {FOLDERS}", hint=JSON if first.suffix in (".json", ".jsonl") else "")
    with _readable(first, key, written.encoding):
        if ending == ".parquet":
            contents, schema = None, pq.read_schema(first)
        else:
            tables = [_commas(file, written, key) if ending in COMMAS else _sheet(file) for file in files]
            for file, table in zip(files, tables):
                clean_names(table.column_names, file, key)
            contents = joined(iter(tables))
            schema = contents.schema
        names = clean_names(schema.names, first, key)
        features = Features({names[name]: of for name, of in Features.from_arrow_schema(schema).items()})

    def read(columns: list[str]) -> Any:
        asked = [original for original, name in names.items() if name in columns]
        with _readable(first, key, None):
            table = joined(pq.read_table(file, columns=asked) for file in files) if contents is None else contents
            return table.select(asked).rename_columns([names[name] for name in asked])

    return Split(str(first), files, features, read)


@contextlib.contextmanager
def _readable(file: Path, key: str, encoding: str | None) -> Iterator[None]:
    """Turn what readers of files raise into one sentence with the way out; of a CSV file's rows, which are private,
    it says never a word.
    """
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # on a damaged file readers raise many unrelated types
        hint = ""
        if ending_of(file) not in COMMAS or isinstance(error, OSError):
            reason = first_line(error)
        elif isinstance(error, UnicodeError) or file.read_bytes()[:2] in (codecs.BOM_LE, codecs.BOM_BE):
            reason, hint = "text in another encoding", ENCODINGS
        elif row := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", str(error)):
            reason = f"line {row[1]} has {row[3]} values, the lines before it {row[2]}"
            hint = "Another separator is data.separator, or --separator."
        else:
            reason = "a file without rows" if "Empty CSV" in str(error) else "no CSV"
            hint = "" if encoding is None else f"It was read as {encoding}; is that its encoding?"
        raise wrong(key, f"{file} ({reason})", f"a readable file: {TABLES}", hint=hint) from None


ENCODINGS = "Another encoding, such as latin-1, cp1252 or utf-16, is data.encoding, or --encoding."


KINDS = {b"PK\x03\x04": "a ZIP archive, as Excel files are", b"\x89PNG": "a picture", b"PAR1": "a parquet file"}
"""What a file is that begins so."""


def _commas(file: Path, written: Written, key: str) -> Any:
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.csv as pc

    with file.open("rb") as opened:
        kind = KINDS.get(opened.read(4))
    require(kind is None, key, f"{file}, which is {kind}", f"a file whose ending says what it is: {TABLES}")
    mark = written.separator or ("\t" if ".tsv" in file.name.lower() else ",")
    mark = {"tab": "\t", "\\t": "\t"}.get(mark, mark)
    require(len(mark) == 1, "data.separator", mark, "one sign, or tab")
    form = pc.ParseOptions(delimiter=mark, newlines_in_values=True)

    def parsed(**options: Any) -> Any:
        source = file if written.encoding is None else _in_utf8(file, written.encoding)
        # Only one thread knows which line is at fault.
        return pc.read_csv(source, pc.ReadOptions(use_threads=False), form, pc.ConvertOptions(**options))

    table = parsed()
    if len(table.column_names) == 1:  # an empty line is a row whose value is missing
        form.ignore_empty_lines = False
        table = parsed()
    if any(map(pa.types.is_binary, table.schema.types)) or "\ufffd" in "".join(table.column_names):
        raise wrong(key, f"{file} (text in another encoding)", f"a readable file: {TABLES}", hint=ENCODINGS)
    # One column whose name has a separator in it was cut at the wrong sign.
    inside = [sign for sign in ";\t|," if sign != mark and sign in table.column_names[0]]
    if len(table.column_names) == 1 and inside:
        sign = "tab" if inside[0] == "\t" else inside[0]
        hint = f"Set data.separator='{sign}', or --separator '{sign}'."
        header, allowed = f"one column, {table.column_names[0]!r}", f"columns with {mark!r} between them"
        raise wrong("data.separator", header, allowed, hint=hint)
    users = [name for name in table.column_names if written.by and clean(name) == clean(written.by)]
    if len(users) == 1 and len(table) and not pa.types.is_string(table[users[0]].type):
        texts = parsed(include_columns=users, column_types={users[0]: pa.string()}, strings_can_be_null=True)
        written_as, read_as = (compute.count_distinct(rows[users[0]]).as_py() for rows in (texts, table))
        if written_as > read_as:
            one = "has users who are written in two ways, as 007 and 7 are, and are one client"
            warnings.warn(f"column {users[0]} {one}. A letter before each keeps them apart", stacklevel=2)
    return table


def _in_utf8(file: Path, encoding: str) -> Any:
    """Return a CSV file's text in UTF-8. pyarrow's own conversion leaves threads that abort the process at its end."""
    import pyarrow as pa

    hint = nearest(encoding, ("utf-8", "latin-1", "cp1252", "utf-16"))
    unknown = wrong("data.encoding", encoding, "latin-1, cp1252 or another that Python knows", hint=hint)
    with turning(LookupError, unknown):
        codecs.lookup(encoding)
    with pa.input_stream(str(file)) as stream:  # it unpacks .gz too
        return pa.BufferReader(stream.read().decode(encoding).encode())


def _sheet(file: Path) -> Any:
    """Return the first sheet of an Excel file; pandas reads it with openpyxl."""
    import pandas as pd
    import pyarrow as pa

    allowed = "an .xlsx file without a password, with pip install 'fedflat[excel]', or a CSV file"
    with turning(ImportError, wrong(f"{file}", "an Excel file that nothing installed reads", allowed)):
        book = pd.ExcelFile(file)
        if len(book.sheet_names) > 1:
            more = counted(len(book.sheet_names) - 1, "other")
            warnings.warn(f"{file}: its first sheet is read, {book.sheet_names[0]}, and not the {more}", stacklevel=2)
        frame = book.parse()
        nameless = [name for name in frame.columns[1:] if str(name).startswith("Unnamed: ")]
        if 2 * len(nameless) >= len(frame.columns) > 1:
            problem = f"{len(nameless)} of {len(frame.columns)} columns without a name in the first row"
            raise wrong(f"{file}", problem, "one row of names above the values, and no title or empty row above it")
        # A column with a word among numbers is text, as in a CSV file: the cell is named where it is read.
        words = [name for name in frame.columns if any(isinstance(value, str) for value in frame[name])]
        frame[words] = frame[words].map(str, na_action="ignore")
        return pa.Table.from_pandas(frame, preserve_index=False)


def _from_hub(dataset: str, owner: str, config: str | None, folder: Path | None) -> dict[str, Split]:
    """Return the splits from the hub (or from the hub client's own cache when offline)."""
    try:
        import datasets

        datasets.disable_progress_bars()
        with hub():
            loaded = datasets.load_dataset(owner, config)
    except Exception as error:  # the hub client raises many unrelated types; all mean: not to be had
        place = f"{owner} ({config})" if config else owner
        looked = f"{folder} (no such folder)" if folder else "FEDFLAT_DATA (not set)"
        message = (
            f"data.dataset: {dataset} not found: looked in {looked} and on the hub for {place}: {first_line(error)}. "
            "Set FEDFLAT_DATA to a folder that holds one folder per data set, or give data.dataset=PATH of parquet or "
            "CSV files."
        )
        offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")
        unknown = type(error).__name__ == "DatasetNotFoundError" and not offline
        raise (InputError if unknown else RunError)(message) from None
    return {name: _hub_split(f"{owner}/{name}", loaded[name]) for name in SPLITS if name in loaded}


def _hub_split(where: str, split: Any) -> Split:
    files = tuple(Path(entry["filename"]) for entry in split.cache_files)
    split = split.rename_columns(clean_names(list(split.features), where, "data.dataset"))
    return Split(where, files, split.features, lambda columns: split.select_columns(columns).with_format("arrow")[:])
