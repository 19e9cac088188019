"""Files with equal bytes for equal rows, in Parquet, CSV and Arrow IPC.

Rows are cut into blocks whose length depends on the schema only; a block is a row group or a record
batch. The bytes therefore do not depend on the batches that are written. All options whose default
pyarrow may change are set here. Whether a new file begins or an open one ends depends only on the
blocks too.

Runs in: the operator's tool, threads of one process; one writer belongs to one thread.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from iskander.errors import ConfigError, ContractError, LimitExceeded, Unsupported
from iskander.lake.sinks.schemas import conform, group_rows
from iskander.lake.sinks.storage import OutputFile, Storage, writing

HIVE_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
PARTITIONS_MAX: Final = 10_000
"""Limit of the partitions of one unit."""
OPEN_MAX: Final = 32
"""Limit of the open files of a unit; above it, the least recently written file is closed."""
BUFFERED_BLOCKS: Final = 8
"""Limit of the rows, in blocks, that wait to be written to the files of partitions."""
COMPRESSIONS: Final = {
    "parquet": ("zstd", "snappy", "gzip", "lz4", "none"),
    "ipc": ("none", "lz4", "zstd"),
    "csv": ("none", "gzip", "zstd"),
}
"""Compressions of a format; the first one is its default."""
ENDINGS: Final = {
    ".parquet": ("parquet", None),
    ".pq": ("parquet", None),
    ".csv": ("csv", None),
    ".csv.gz": ("csv", "gzip"),
    ".csv.zst": ("csv", "zstd"),
    ".arrow": ("ipc", None),
    ".ipc": ("ipc", None),
    ".feather": ("ipc", None),
}
"""Format and compression for an end of a file name; None: the end implies no compression."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Columns, format and partitions of the files of an output.

    Attributes:
        schema: Columns, without metadata.
        metadata: Key-value metadata of each file; CSV has none.
        format: `parquet`, `csv` or `ipc`.
        compression: One of `COMPRESSIONS`.
        partition_by: Columns of hive folders.
        has_partition_columns: Whether files contain the partition columns too.
        sort_by: Columns that the files of a finished output are sorted by.
        file_bytes: Bytes after which a new file begins; None for a single file.
    """

    schema: pa.Schema
    metadata: Mapping[str, str] = field(default_factory=dict)
    format: str = "parquet"
    compression: str = "zstd"
    partition_by: tuple[str, ...] = ()
    has_partition_columns: bool = False
    sort_by: tuple[str, ...] = ()
    file_bytes: int | None = None

    @property
    def file_schema(self) -> pa.Schema:
        """Columns of one file."""
        if self.has_partition_columns:
            return self.schema
        return pa.schema([column for column in self.schema if column.name not in self.partition_by])

    @property
    def ending(self) -> str:
        """End of the names of files."""
        if self.format == "csv":
            return {"none": ".csv", "gzip": ".csv.gz", "zstd": ".csv.zst"}[self.compression]
        return ".arrow" if self.format == "ipc" else ".parquet"


@dataclass(frozen=True)
class Staged:
    """A unit whose files are complete, but not committed.

    Attributes:
        index: Index of the unit.
        path: Folder of the files.
        rows: Rows in all files.
        bytes: Bytes of all files.
    """

    index: int
    path: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class WrittenFile:
    """One file of a unit: path below the unit's folder, rows and bytes."""

    path: str
    rows: int
    bytes: int


def compression_of(format: str, wanted: str | None) -> str:
    """Return the wanted compression of a format, or its default for None.

    Raises:
        ConfigError: The format does not have the wanted compression.
    """
    known = COMPRESSIONS[format]
    if wanted is None:
        return known[0]
    if wanted not in known:
        raise ConfigError(
            f"compression is {wanted!r}; files of format {format} have {', '.join(known)}"
        )
    return wanted


def format_of(name: str) -> tuple[str, str | None] | None:
    """Return format and compression by the end of a file name; None if the end is unknown."""
    lower = name.lower()
    for end in sorted(ENDINGS, key=len, reverse=True):
        if lower.endswith(end) and len(lower) > len(end):
            return ENDINGS[end]
    return None


def check_csv(schema: pa.Schema) -> None:
    """Check that CSV can represent the columns.

    Raises:
        Unsupported: A column has a nested type or an extension type.
    """
    for column in schema:
        kind = column.type
        if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
            raise Unsupported(
                f"output column {column.name!r} has the type {kind}, which CSV cannot have; write "
                "Parquet, or leave the column out with --keep"
            )


class Blocks:
    """Cuts and joins batches to tables with an exact number of rows, and one chunk a column.

    Args:
        schema: Columns of the batches.
        rows: Rows of a block; only the last one is shorter.
    """

    def __init__(self, schema: pa.Schema, rows: int) -> None:
        self._schema = schema
        self._rows = rows
        self._waiting: list[pa.RecordBatch] = []
        self._count = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.Table]:
        """Add a batch; yield the blocks that it completes."""
        offset = 0
        while offset < batch.num_rows:
            part = batch.slice(offset, self._rows - self._count)
            offset += part.num_rows
            self._waiting.append(part)
            self._count += part.num_rows
            if self._count == self._rows:
                yield self._block()

    def rest(self) -> Iterator[pa.Table]:
        """Yield the last, shorter block, if it has rows."""
        if self._count:
            yield self._block()

    def _block(self) -> pa.Table:
        block = pa.Table.from_batches(self._waiting, self._schema).combine_chunks()
        self._waiting, self._count = [], 0
        return block


class FileWriter:
    """Writer of one file.

    Args:
        file: File to which the bytes are written; the writer finishes or abandons it.
        layout: Layout of the file.
        schema: Columns of the file.
    """

    def __init__(self, file: OutputFile, layout: Layout, schema: pa.Schema) -> None:
        self.file = file
        self.rows = 0
        self._schema = schema.with_metadata(dict(layout.metadata) or None)
        self._format = layout.format
        self._stream: Any = None
        try:
            self._writer = self._open(layout)
        except (OSError, pa.ArrowException):
            self.abandon()
            raise

    def _open(self, layout: Layout) -> Any:  # noqa: ANN401
        self._writer = None
        if layout.format == "parquet":
            names = self._schema.names
            keys = [name for name in layout.sort_by if name in names]
            # All sort columns must be in the file: rows are not sorted by later columns alone.
            is_sorted = bool(keys) and tuple(keys) == layout.sort_by
            return pq.ParquetWriter(
                self.file,
                self._schema,
                version="2.6",
                compression=layout.compression,
                # Scores rarely repeat, so a dictionary of scores would only cost time.
                use_dictionary=[
                    column.name for column in self._schema if not pa.types.is_floating(column.type)
                ],
                write_statistics=True,
                data_page_version="1.0",
                data_page_size=1 << 20,
                dictionary_pagesize_limit=1 << 20,
                write_batch_size=1024,
                store_schema=True,
                use_compliant_nested_type=True,
                sorting_columns=(
                    [pq.SortingColumn(names.index(name)) for name in keys] if is_sorted else None
                ),
            )
        if layout.format == "ipc":
            codec = None if layout.compression == "none" else layout.compression
            options = pa.ipc.IpcWriteOptions(compression=codec)
            return pa.ipc.new_file(self.file, self._schema, options=options)
        target: Any = self.file
        if layout.compression != "none":
            target = self._stream = pa.CompressedOutputStream(
                pa.PythonFile(self.file, "w"), layout.compression
            )
        options = pacsv.WriteOptions(
            include_header=True, batch_size=1024, delimiter=",", quoting_style="needed"
        )
        return pacsv.CSVWriter(target, self._schema, write_options=options)

    def write(self, block: pa.Table) -> None:
        """Write a block as one row group or record batch."""
        table = block.replace_schema_metadata(self._schema.metadata)
        if self._format == "parquet":
            self._writer.write_table(table, row_group_size=max(block.num_rows, 1))
        elif self._format == "ipc":
            # A copy has zeros under nulls and behind the last bit, where a slice has other values.
            copy = table.take(pa.arange(0, block.num_rows))
            self._writer.write_table(copy.combine_chunks())
        else:
            self._writer.write_table(table)
        self.rows += block.num_rows

    def finish(self) -> None:
        """Complete the file and sync it to disk."""
        try:
            self._writer.close()
            if self._stream is not None:
                self._stream.close()
        except (OSError, pa.ArrowException):
            self.abandon()
            raise
        self.file.finish()

    def abandon(self) -> None:
        """Close the file and its writers without further writes."""
        self.file.discard()
        for stream in (self._writer, self._stream):
            if stream is not None:
                with suppress(OSError, pa.ArrowException):
                    stream.close()
        self.file.abandon()


@dataclass
class _Partition:
    """Waiting rows and files of one combination of values in the partition columns."""

    folder: str
    waiting: list[pa.Table] = field(default_factory=list)
    rows: int = 0
    files: int = 0
    writer: FileWriter | None = None
    path: str = ""


class UnitWriter:
    """Writer of the files of one unit, below one folder.

    Args:
        storage: Storage of the folder.
        folder: Folder of the files.
        name: Name of the files, before a number and the ending.
        layout: Layout of the files.
    """

    def __init__(self, storage: Storage, folder: str, name: str, layout: Layout) -> None:
        self.files: list[WrittenFile] = []
        self._storage = storage
        self._folder = folder
        self._name = name
        self._layout = layout
        self._schema = layout.file_schema
        self._block_rows = group_rows(layout.schema)
        self._blocks = Blocks(layout.schema, self._block_rows)
        self._partitions: dict[str, _Partition] = {}
        self._open: dict[str, _Partition] = {}
        self._buffered = 0

    def __enter__(self) -> UnitWriter:
        """Return the writer; after an error in the block all files are closed but not deleted."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abandon()

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch.

        Raises:
            OutputError: The system rejects to write.
            ContractError: The batch does not fit the schema.
            LimitExceeded: There are too many partitions.
        """
        for block in self._blocks.add(conform(batch, self._layout.schema)):
            self._write_block(block)

    def finish(self) -> list[WrittenFile]:
        """Complete and return all files; without rows there is none."""
        for block in self._blocks.rest():
            self._write_block(block)
        for partition in self._partitions.values():
            self._flush(partition)
            self._close(partition)
        return self.files

    def write_empty(self) -> None:
        """Write one file without rows, with all columns."""
        self._schema = self._layout.schema
        partition = _Partition("")
        with writing(self._folder):
            self._writer(partition).write(self._layout.schema.empty_table())
        self._close(partition)

    def abandon(self) -> None:
        """Close all open files without further writes; their contents are not used."""
        for partition in self._open.values():
            if partition.writer is not None:
                partition.writer.abandon()
        self._open.clear()

    def _write_block(self, block: pa.Table) -> None:
        for folder, rows in self._split(block):
            partition = self._partitions.get(folder)
            if partition is None:
                if len(self._partitions) >= PARTITIONS_MAX:
                    raise LimitExceeded(
                        f"{self._name}: more than {PARTITIONS_MAX:,} partitions in one unit; "
                        "choose columns with fewer values for --partition-by"
                    )
                partition = self._partitions[folder] = _Partition(folder)
            partition.waiting.append(rows)
            partition.rows += rows.num_rows
            self._buffered += rows.num_rows
            if partition.rows >= self._block_rows:
                self._flush(partition)
        while self._buffered > BUFFERED_BLOCKS * self._block_rows:
            # `max` returns the first of equal partitions, and dictionaries keep their order.
            self._flush(max(self._partitions.values(), key=lambda partition: partition.rows))

    def _split(self, block: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        """Split a block by the partition columns; rows keep their order."""
        names = self._layout.partition_by
        if not names:
            yield "", block
            return
        codes = pa.array([0] * block.num_rows, pa.int64())
        for name in names:
            column = block.column(name).combine_chunks()
            encoded = column.dictionary_encode("encode")
            if isinstance(encoded, pa.ChunkedArray):
                encoded = encoded.combine_chunks()
            codes = pc.add(pc.multiply(codes, len(encoded.dictionary)), encoded.indices)
            # The codes are encoded again after each column, so that the product does not overflow.
            codes = pc.cast(codes.dictionary_encode().indices, pa.int64())
        order = pc.sort_indices(codes)
        ordered = block.take(order)
        counts = sorted(
            (entry["values"].as_py(), entry["counts"].as_py()) for entry in pc.value_counts(codes)
        )
        start = 0
        for _, count in counts:
            rows = ordered.slice(start, count)
            folder = "".join(f"{_quoted(name)}={self._folder_text(name, rows)}/" for name in names)
            yield folder, rows.select(self._schema.names)
            start += count

    def _folder_text(self, name: str, rows: pa.Table) -> str:
        value = rows.column(name)[0].as_py()
        if value is None:
            return HIVE_NULL
        if value == HIVE_NULL:
            raise ContractError(
                f"column {name!r} has the value {value!r}, which stands for null in folder names",
                column=name,
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return _quoted(text)

    def _flush(self, partition: _Partition) -> None:
        """Write the waiting rows of a partition, in row groups of one block."""
        if not partition.rows:
            return
        block = pa.concat_tables(partition.waiting).combine_chunks()
        partition.waiting = []
        self._buffered -= partition.rows
        partition.rows = 0
        limit = self._layout.file_bytes
        with writing(self._folder):
            writer = self._writer(partition)
            for start in range(0, block.num_rows, self._block_rows):
                part = block.slice(start, self._block_rows)
                writer.write(part.combine_chunks())
        if limit is not None and writer.file.bytes >= limit:
            self._close(partition)

    def _writer(self, partition: _Partition) -> FileWriter:
        """Return the writer of a partition; open a new file if it has none."""
        if partition.writer is None:
            if len(self._open) >= OPEN_MAX:
                self._close(next(iter(self._open.values())))
            # `_` sorts after the dot of the ending, so that names sort in the order of rows.
            number = f"_{partition.files:05d}" if partition.files else ""
            partition.path = f"{partition.folder}{self._name}{number}{self._layout.ending}"
            file = self._storage.create(f"{self._folder}/{partition.path}")
            partition.writer = FileWriter(file, self._layout, self._schema)
            partition.files += 1
        self._open.pop(partition.folder, None)
        self._open[partition.folder] = partition
        return partition.writer

    def _close(self, partition: _Partition) -> None:
        writer, partition.writer = partition.writer, None
        self._open.pop(partition.folder, None)
        if writer is None:
            return
        with writing(f"{self._folder}/{partition.path}"):
            writer.finish()
        self.files.append(WrittenFile(partition.path, writer.rows, writer.file.bytes))


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe=" !$'()+,-.;@^_`{}~&[]")


def partition_values(path: str) -> dict[str, str | None]:
    """Return the values of the hive folders of a path, as texts by column."""
    values: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        name, mark, text = folder.partition("=")
        if mark:
            value = urllib.parse.unquote(text)
            values[urllib.parse.unquote(name)] = None if value == HIVE_NULL else value
    return values
