"""Files of Delta, Iceberg and Hudi tables: rejected however they are reached, unless permitted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from iskander.errors import ConfigError, SourceError
from iskander.lake.sources import open_source
from iskander.lake.sources.files import FileSource
from iskander.lake.sources.places import Place, expand
from iskander.lake.sources.tables import Tables


def ids(source: Any) -> list[int]:
    return [
        number
        for unit in source.units()
        for batch in source.read(unit, ["id"], None, 100)
        for number in batch["id"].to_pylist()
    ]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A Delta table with the rows 1 and 2, whose folder has the removed rows too."""
    for numbers in ([1, 2, 3, 4], [1, 2]):
        data = pa.table({"id": numbers, "p": ["b"] * len(numbers)})
        deltalake.write_deltalake(
            str(tmp_path / "lake" / "table"), data, partition_by=["p"], mode="overwrite"
        )
    return tmp_path / "lake"


FORMS = [
    "",
    "table/p=b",
    "table/*/*.parquet",
    "table/**",
    "table/p=b/*",
    "table/[p]=b",
    "*",
    "**/*.parquet",
    "table/p=b/{file}",
    "../link",
    "../folder",
    "../folder/*",
    "../linked.parquet",
]


def path_of(lake: Path, form: str) -> str:
    (file, _) = sorted((lake / "table").rglob("*.parquet"))
    (lake.parent / "link").symlink_to(lake / "table" / "p=b")
    (lake.parent / "linked.parquet").symlink_to(file)
    (lake.parent / "folder").mkdir()
    (lake.parent / "folder" / "a.parquet").symlink_to(file)
    return f"{lake}/{form.format(file=file.name)}"


@pytest.mark.parametrize("form", FORMS)
def test_files_of_a_delta_table_are_rejected_with_the_input_to_use(lake: Path, form: str) -> None:
    path = path_of(lake, form)
    text = rf"belongs to the Delta table {re.escape(str(lake))}/table, .* delta://.*--plain-files"
    with pytest.raises(SourceError, match=text) as caught:
        open_source([path])
    assert caught.value.fields["table"] == f"{lake}/table"
    assert ids(open_source([f"delta://{caught.value.fields['table']}"])) == [1, 2]


@pytest.mark.parametrize("form", FORMS)
def test_plain_files_are_read_if_they_are_asked_for(lake: Path, form: str) -> None:
    assert set(ids(open_source([path_of(lake, form)], plain_files=True))) <= {1, 2, 3, 4}


def test_table_itself_is_an_input_and_plain_on_request(lake: Path) -> None:
    assert ids(open_source([f"{lake}/table"])) == [1, 2]
    assert sorted(ids(open_source([f"{lake}/table"], plain_files=True))) == [1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("given", ["delta:///t", "iceberg://c/n.t", "-"])
def test_plain_files_with_another_input_are_a_wrong_option(given: str) -> None:
    with pytest.raises(ConfigError, match="--plain-files"):
        open_source([given], plain_files=True)


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": [1]}), path)
    else:
        path.write_text(text)
    return path


MARKS = [
    ("Iceberg", "metadata/00000-8a6ea4a0-0b0e-4b0e-8b6a-000000000000.metadata.json"),
    ("Iceberg", "metadata/v3.gz.metadata.json"),
    ("Iceberg", "metadata/v1.metadata.json.gz"),
    ("Hudi", ".hoodie/hoodie.properties"),
    ("Delta", "_delta_log/00000000000000000000.json"),
]


@pytest.mark.parametrize("form", ["t", "t/data", "t/data/*", "t/data/p=1/a.parquet", "."])
@pytest.mark.parametrize(("format", "mark"), MARKS)
def test_each_format_is_recognized(tmp_path: Path, format: str, mark: str, form: str) -> None:
    write(tmp_path / "t" / mark)
    write(tmp_path / "t" / "data" / "p=1" / "a.parquet")
    with pytest.raises(SourceError, match=rf"belongs to the {format} table {tmp_path}/t,"):
        FileSource([str(tmp_path / form)])
    if "data" in form:
        assert ids(FileSource([str(tmp_path / form)], plain_files=True)) == [1]


@pytest.mark.parametrize(
    "other",
    [
        "metadata/a.json",
        "metadata/metadata.json",
        "other/v1.metadata.json",
        "beside/_delta_log/0.json",
        "beside/.hoodie/x",
        "beside/metadata/v1.metadata.json",
        "_delta_log.json",
        "x_delta_log/0.json",
    ],
)
@pytest.mark.parametrize("form", ["t/data", "t/data/*", "t/data/a.parquet"])
def test_other_folders_are_no_tables(tmp_path: Path, other: str, form: str) -> None:
    write(tmp_path / "t" / other)
    write(tmp_path / "t" / "data" / "a.parquet")
    assert ids(FileSource([str(tmp_path / form)])) == [1]


def test_input_beside_an_empty_table_is_plain(tmp_path: Path) -> None:
    write(tmp_path / "data" / "empty" / "_delta_log" / "0.json")
    write(tmp_path / "data" / "a.parquet")
    assert ids(FileSource([str(tmp_path / "data")])) == [1]


class Store(pafs.FileSystemHandler):  # type: ignore[misc]
    """An object store in memory that counts its requests."""

    def __init__(self, *keys: str, denied: str = "") -> None:
        self.keys = keys
        self.denied = denied
        self.requests: list[str] = []

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> pafs.FileInfo:
        self.requests.append(path)
        if self.denied and path.startswith(self.denied):
            raise OSError(f"ACCESS_DENIED {path}")
        if path in self.keys:
            return pafs.FileInfo(path, pafs.FileType.File, size=1)
        is_folder = any(key.startswith(path + "/") for key in self.keys)
        kind = pafs.FileType.Directory if is_folder else pafs.FileType.NotFound
        return pafs.FileInfo(path, kind)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        base = selector.base_dir
        self.requests.append(f"list {base}")
        found = set()
        for key in self.keys:
            if key.startswith(base + "/"):
                parts = key[len(base) + 1 :].split("/")
                last = len(parts) if selector.recursive else 1
                found |= {base + "/" + "/".join(parts[: end + 1]) for end in range(last)}
        return [self._quiet(path) for path in sorted(found)]

    def _quiet(self, path: str) -> pafs.FileInfo:
        info = self._info(path)
        self.requests.pop()
        return info

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not used")

    get_type_name = normalize_path = delete_dir = create_dir = delete_dir_contents = None
    delete_root_dir_contents = delete_file = move = copy_file = open_input_stream = None
    open_input_file = open_output_stream = open_append_stream = None


def checked(store: Store, *paths: str) -> None:
    tables = Tables()
    filesystem = pafs.PyFileSystem(store)
    for path in paths:
        place = Place(filesystem, path, f"x://{path}", "x://")
        infos, _ = expand(place, tables.note)
        tables.require_plain(place, [info.path for info in infos])


def test_object_store_is_asked_once_for_each_folder_that_no_listing_shows() -> None:
    keys = [f"b/lake/data/y={year}/p={part}/f.parquet" for year in range(9) for part in range(9)]
    store = Store(*keys)
    checked(store, "b/lake/data/*/*/*.parquet")
    asked = [each for each in store.requests if "_delta_log" in each]
    assert sorted(asked) == ["b/_delta_log", "b/lake/_delta_log"]
    listings = [each for each in store.requests if each.startswith("list")]
    assert len(listings) == len(set(listings)) == 1 + 9 + 81
    assert len(store.requests) < len(listings) + 10
    folder = Store(*keys)
    checked(folder, "b/lake/data")
    assert len(folder.requests) == 2 + 6
    files = Store(*keys)
    checked(files, *keys)
    asked = [each for each in files.requests if "_delta_log" in each]
    assert len(asked) == len(set(asked)) == 3 + 9 + 81


@pytest.mark.parametrize("path", ["b/lake", "b/lake/*/*/*", "b/lake/t/data/f.parquet"])
def test_table_in_an_object_store_is_named_with_its_scheme(path: str) -> None:
    store = Store("b/lake/t/data/f.parquet", "b/lake/t/_delta_log/0.json")
    with pytest.raises(SourceError, match=r"Delta table x://b/lake/t, .* delta://x://b/lake/t,"):
        checked(store, path)
    store = Store("b/lake/t/data/f.parquet", "b/lake/t/metadata/v1.metadata.json")
    with pytest.raises(SourceError, match=r"Iceberg table x://b/lake/t,"):
        checked(store, path)


def test_equal_paths_of_two_stores_are_looked_up_in_each() -> None:
    plain = Store("b/t/data/f.parquet")
    table = Store("b/t/data/f.parquet", "b/t/_delta_log/0.json")
    tables = Tables()
    for store in (plain, table):
        place = Place(pafs.PyFileSystem(store), "b/t/data", "x://b/t/data", "x://")
        infos, _ = expand(place, tables.note)
        paths = [info.path for info in infos]
        if store is plain:
            tables.require_plain(place, paths)
        else:
            with pytest.raises(SourceError, match="Delta table"):
                tables.require_plain(place, paths)


def test_folder_that_cannot_be_looked_up_is_an_error_with_the_way_out() -> None:
    store = Store("b/lake/data/f.parquet", denied="b/_delta_log")
    text = r"f\.parquet: cannot tell .* ACCESS_DENIED.*--plain-files"
    with pytest.raises(SourceError, match=text):
        checked(store, "b/lake/data")
