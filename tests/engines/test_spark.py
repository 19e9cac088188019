"""A Spark session with two tasks at a time, and two servers that its DataFrames are scored with.

Skipped without pyspark or Java. A task is tried up to four times.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import models
from support.processes import Gateway, running
from support.scaling_page import block

from iskander import spark
from iskander.client import Client, Retry
from iskander.errors import ConfigError, ContractError, ModelNotFound, NotReady

sql = pytest.importorskip("pyspark.sql")
if shutil.which("java") is None:
    pytest.skip("Java is not installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("default")
ROWS, PARTITIONS, SPARK_ROWS = 200_000, 8, 5000
Batches = Iterator[pa.RecordBatch]


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = sql.SparkSession.builder.master("local[2,4]")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(SPARK_ROWS),
        "spark.log.level": "ERROR",
    }.items():
        builder = builder.config(name, value)
    started = builder.getOrCreate()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="module")
def served(folder: Path) -> list[dict[str, Any]]:
    models.row_ids(folder / "ids")
    return [{"name": name, "path": str(folder / "ids")} for name in ("ids", "fraud")]


@pytest.fixture(scope="module")
def gateways(folder: Path, served: list[dict[str, Any]]) -> Iterator[list[Gateway]]:
    for name in ("a", "b"):
        (folder / name).mkdir()
    with running(folder / "a", served) as first, running(folder / "b", served) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def numbers(session: Any) -> Any:
    """Rows with the model's input `x`, and a label."""
    frame = session.range(0, ROWS, 1, PARTITIONS)
    return frame.selectExpr("id AS x", "concat('row ', id) AS label")


def addresses(gateways: list[Gateway]) -> list[str]:
    return [each.address for each in gateways]


def batches_run(address: str) -> int:
    with Client(address) as client:
        return sum(lane["batch_rows"]["count"] for lane in client.stats()["lanes"].values())


def require_each_row_once(frame: Any, rows: int = ROWS) -> None:
    table = frame.toArrow().sort_by("x")
    assert table["x"].to_pylist() == list(range(rows))
    assert table["y"].to_pylist() == [3 * x + 1 for x in range(rows)]


def test_batch_job(numbers: Any, gateways: list[Gateway]) -> None:
    scored = spark.scorer("ids", addresses(gateways)).apply(numbers)
    assert scored.columns == ["x", "label", "y"]
    require_each_row_once(scored)
    row = scored.where("x = 199999").first()
    assert (row.label, row.y) == ("row 199999", 600_000 - 2)
    assert all(batches_run(address) > 0 for address in addresses(gateways))
    assert scored.limit(3).count() == 3


def test_block_of_the_page(session: Any, gateways: list[Gateway]) -> None:
    own, other = addresses(gateways)
    port = f"preferred={own.rpartition(':')[2]}"
    names = {"df": session.range(1000).selectExpr("id", "id AS x")}
    addressed = {"node1:8815": own, "node2:8815": other, "preferred=8815": port}
    exec(compile(block("Spark", addressed), "page", "exec"), names)
    scored: Any = names["scored"]
    rows = sorted((row.id, row.y) for row in scored.collect())
    assert rows == [(x, 3 * x + 1) for x in range(1000)]


def test_schema_as_ddl(numbers: Any, gateways: list[Gateway]) -> None:
    scorer = spark.scorer("ids", addresses(gateways), columns={"x": "n"}, keep=["label"])
    few = numbers.limit(5).withColumnRenamed("x", "n")
    ddl = scorer.ddl(few.schema)
    assert ddl == "label STRING NOT NULL,y BIGINT"
    rows = few.mapInArrow(scorer, ddl).collect()
    assert sorted((row.label, row.y) for row in rows) == [(f"row {x}", 3 * x + 1) for x in range(5)]


def test_killed_python_worker(numbers: Any, gateways: list[Gateway], folder: Path) -> None:
    """The first attempt of each of two partitions ends after some batches of its output."""
    scorer = spark.scorer("ids", addresses(gateways), keep=["x"], batch_rows=1000)
    killed = folder / "killed"
    killed.mkdir()
    paths = [str(killed / str(partition)) for partition in (1, 4)]
    number = int(signal.SIGKILL)

    def score(batches: Batches) -> Batches:
        from pyspark import TaskContext

        task = TaskContext.get()
        for index, batch in enumerate(scorer(batches)):
            path = next((each for each in paths if each.endswith(f"/{task.partitionId()}")), None)
            if path is not None and index == 7 and task.attemptNumber() == 0:
                Path(path).touch()
                os.kill(os.getpid(), number)
            yield batch

    require_each_row_once(numbers.mapInArrow(score, scorer.schema(numbers.schema)))
    assert sorted(path.name for path in killed.iterdir()) == ["1", "4"]


@pytest.mark.parametrize("is_preferred", [False, True], ids=["any", "preferred"])
def test_killed_gateway(
    numbers: Any,
    gateways: list[Gateway],
    served: list[dict[str, Any]],
    tmp_path: Path,
    is_preferred: bool,
) -> None:
    """A task kills the server in the middle of the job: the rest goes to the other one."""
    lost, other = Gateway(tmp_path, served).start(), gateways[0]
    try:
        lost.wait_full()
        scorer = spark.scorer(
            "ids",
            [lost.address, other.address],
            keep=["x"],
            batch_rows=1000,
            preferred=lost.address if is_preferred else None,
            retry=Retry(attempts=2),
        )
        before, pid, number = batches_run(other.address), lost.pid, int(signal.SIGKILL)
        marker = str(tmp_path / "killed")

        def score(batches: Batches) -> Batches:
            from pyspark import TaskContext

            is_third = TaskContext.get().partitionId() == 2
            for index, batch in enumerate(scorer(batches)):
                if is_third and index == 5:
                    Path(marker).touch()
                    os.kill(pid, number)
                yield batch

        require_each_row_once(numbers.mapInArrow(score, scorer.schema(numbers.schema)))
        assert Path(marker).exists()
        assert lost.wait() == -number
        # Of five partitions of 25 calls; a batch may have the rows of several calls.
        assert batches_run(other.address) >= before + 50
    finally:
        lost.end()


def test_port_of_the_executors_host_is_preferred(numbers: Any, gateways: list[Gateway]) -> None:
    own, other = gateways
    port = int(own.address.rpartition(":")[2])
    before = [batches_run(each.address) for each in (own, other)]
    scorer = spark.scorer("ids", other.address, keep=["x"], preferred=port)
    require_each_row_once(scorer.apply(numbers))
    after = [batches_run(each.address) for each in (own, other)]
    assert after[0] > before[0] and after[1] == before[1]


def test_rejected_rows(session: Any, gateways: list[Gateway]) -> None:
    frame = session.sql("SELECT explode(array(1L, NULL, 3L)) AS x").coalesce(1)
    failing = spark.scorer("ids", addresses(gateways)).apply(frame)
    with pytest.raises(Exception, match=r"iskander.errors.ContractError.*null"):
        failing.collect()
    scored = spark.scorer("ids", addresses(gateways), on_error="null").apply(frame)
    assert [row.y for row in scored.collect()] == [4, None, 10]


def test_structured_streaming_from_files(
    session: Any, gateways: list[Gateway], tmp_path: Path
) -> None:
    """Two runs of a query with one checkpoint, over files that arrive before each of them."""
    scorer = spark.scorer("ids", addresses(gateways))
    rows, files, found = 1000, 4, []

    def save(batch: Any, _: int) -> None:
        found.append(batch.toArrow())

    (tmp_path / "in").mkdir()
    for part in range(2):
        for index in range(part * files, (part + 1) * files):
            table = pa.table({"x": range(index * rows, (index + 1) * rows)})
            pq.write_table(table, tmp_path / "in" / f"{index}.parquet")
        reader = session.readStream.schema("x BIGINT").option("maxFilesPerTrigger", 2)
        writer = scorer.apply(reader.parquet(str(tmp_path / "in"))).writeStream.foreachBatch(save)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert writer.trigger(availableNow=True).start().awaitTermination(60)
    assert [each.num_rows for each in found] == [2 * rows] * files
    table = pa.concat_tables(found).sort_by("x")
    assert table.to_pydict() == {
        "x": list(range(2 * files * rows)),
        "y": [3 * x + 1 for x in range(2 * files * rows)],
    }


def test_structured_streaming_from_a_rate(session: Any, gateways: list[Gateway]) -> None:
    reader = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 500)
    frame = reader.option("numPartitions", 2).load()
    scorer = spark.scorer("ids", addresses(gateways), columns={"x": "value"})
    assert [each.name for each in scorer.schema(frame.schema)] == ["timestamp", "value", "y"]
    query = scorer.apply(frame).writeStream.format("memory").queryName("rates").start()
    try:
        while query.lastProgress is None or query.lastProgress["batchId"] < 2:
            assert query.isActive, query.exception()
            query.awaitTermination(0.1)
    finally:
        query.stop()
    values = [(row.value, row.y) for row in session.sql("SELECT * FROM rates").collect()]
    assert len(values) >= 1000
    assert sorted(values) == [(x, 3 * x + 1) for x in range(len(values))]


def test_errors_on_the_driver(session: Any, numbers: Any, gateways: list[Gateway]) -> None:
    target = addresses(gateways)

    def checked(frame: Any, **options: Any) -> Callable[[], Any]:
        return lambda: spark.scorer("ids", target, **options).apply(frame)

    renamed = numbers.withColumnRenamed("x", "x_")
    array = session.sql("SELECT parse_json('1') AS x")
    for call, error, text in (
        (checked(renamed), ContractError, r"column `x` is missing.*nearest is `x_`"),
        (checked(numbers, columns={"x": "label"}), ContractError, "column `label`: wanted int64"),
        (checked(numbers.withColumn("y", numbers.x)), ContractError, "column `y` is in the data"),
        (checked(numbers, keep=["labels"]), ConfigError, "did you mean `label`"),
        (checked(numbers.select("x", "x")), ContractError, "2 columns are named `x`"),
        (checked(array), ContractError, "Spark type variant, which is not supported"),
        (checked(numbers, version="7"), ModelNotFound, "7"),
        (checked(1), ConfigError, "`frame` is of the type int"),
        (lambda: spark.scorer("none", target), ModelNotFound, "none"),
        (lambda: spark.scorer("ids", "127.0.0.1:1", retry=Retry(attempts=1)), NotReady, ":1"),
    ):
        with pytest.raises(error, match=text):
            call()
    clash = numbers.withColumn("y", numbers.x).limit(1)
    row = spark.scorer("ids", target, keep=["x"]).apply(clash).first()
    assert row.asDict() == {"x": 0, "y": 1}
