"""Trains the two-tower recommender in `configs/models/movielens-two-tower`.

The split and the metrics need only numpy and pyarrow, so a test can recompute the recorded figures
without torch. Functions import torch, onnx and onnxruntime locally.
"""

import argparse
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.csv

if TYPE_CHECKING:
    import onnx
    import torch

DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "configs/models/movielens-two-tower"

HOLDOUT_FRACTION = 0.2
VALIDATION_FRACTION = 0.2
SPLIT_RULE = (
    "one global split by time: sort all timestamps ascending, take the one at index "
    "rows - round(rows * holdout_fraction) as split_timestamp, and hold out every rating whose "
    "timestamp is split_timestamp or later"
)
SCORE_MIN = 0.5
SCORE_MAX = 5.0

UNKNOWN_ROW = 0
EMBEDDING_WIDTH = 32
HIDDEN_WIDTH = 64
BATCH_ROWS = 1024
LEARNING_RATE = 0.002
# Penalties are in ratings: a user or an item needs about this number of ratings to reach half of
# its own bias, as in b = sum(residuals) / (count + shrinkage).
BIAS_SHRINKAGE_RATINGS = 4.0
EMBEDDING_SHRINKAGE_RATINGS = 10.0
USER_DROPOUT = 0.3
# An item with n ratings trains the unknown row with probability c / (c + n): unknown items resemble
# past rare items, not popular ones.
ITEM_DROPOUT_RATINGS = 3.0

MANIFEST = """\
format = 1
passthrough = ["user_id", "item_id"]

[[inputs]]
column = "user_id"
type = "int64"
nullable = false
tensor = "user_id"

[[inputs]]
column = "item_id"
type = "int64"
nullable = false
tensor = "item_id"

[[outputs]]
tensor = "score"
column = "score"
type = "float32"
"""

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.floating]
Mask = npt.NDArray[np.bool_]
LookupTable = npt.NDArray[np.int32]


class Ratings(NamedTuple):
    """Ratings as parallel columns, one row per rating.

    Units: `timestamps` are seconds since 1970-01-01 UTC.
    """

    user_ids: Ids
    item_ids: Ids
    scores: npt.NDArray[np.float64]
    timestamps: npt.NDArray[np.int64]

    def where(self, mask: Mask) -> "Ratings":
        """Returns the rows for which `mask` is true, in their order."""
        return Ratings(
            self.user_ids[mask], self.item_ids[mask], self.scores[mask], self.timestamps[mask]
        )


class Vocabulary(NamedTuple):
    """The dense tables that map raw ids to embedding rows."""

    user_lookup: LookupTable
    item_lookup: LookupTable


class Parameters(NamedTuple):
    """The learned weights, by their names in the graph, and the lookup tables."""

    vocabulary: Vocabulary
    mean_score: float
    weights: "dict[str, torch.Tensor]"


def main() -> int:
    """Trains, measures on the held-out ratings, and writes the model if it beats the baseline."""
    arguments = parse_arguments()
    ratings = read_ratings(arguments.ratings)
    heldout_at = split_timestamp(ratings.timestamps, HOLDOUT_FRACTION)
    is_heldout = ratings.timestamps >= heldout_at
    training, heldout = ratings.where(~is_heldout), ratings.where(is_heldout)

    parameters, epochs_count = train(training, seed=arguments.seed, epochs_max=arguments.epochs)
    model_bytes = build_model(parameters).SerializeToString()
    check_model(model_bytes, parameters, heldout)

    # Metrics of the file as ONNX Runtime executes it.
    model_scores = run_model(model_bytes, heldout.user_ids, heldout.item_ids)
    model_metrics = metrics(model_scores, heldout.scores)
    baseline_scores = item_mean_scores(training, heldout.item_ids)
    baseline_metrics = metrics(baseline_scores, heldout.scores)
    figures = {
        "data": "MovieLens ml-latest-small, ratings.csv",
        "holdout_fraction": HOLDOUT_FRACTION,
        "split": SPLIT_RULE,
        "split_timestamp": heldout_at,
        "rows_training": len(training.scores),
        "rows_heldout": len(heldout.scores),
        "rows_heldout_unseen_user": int(np.sum(~np.isin(heldout.user_ids, training.user_ids))),
        "rows_heldout_unseen_item": int(np.sum(~np.isin(heldout.item_ids, training.item_ids))),
        "model": model_metrics,
        "baseline": {
            "name": "item mean of the training part, global mean for unseen items",
            **baseline_metrics,
        },
        "seed": arguments.seed,
        "epochs": epochs_count,
        "model_sha256": hashlib.sha256(model_bytes).hexdigest(),
    }
    print(json.dumps(figures, indent=2))

    if any(model_metrics[name] >= baseline_metrics[name] for name in model_metrics):
        print("the model does not beat the item mean; nothing was written", file=sys.stderr)
        return 1

    version_directory = arguments.output / "1"
    version_directory.mkdir(parents=True, exist_ok=True)
    (version_directory / "model.onnx").write_bytes(model_bytes)
    (version_directory / "manifest.toml").write_text(MANIFEST)
    (version_directory / "heldout.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"wrote {version_directory} ({len(model_bytes)} bytes of model.onnx)")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratings", type=Path, required=True, help="MovieLens ratings.csv")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="the model's directory")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=25, help="maximum number of epochs")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {arguments.epochs}")
    return arguments


def read_ratings(path: Path) -> Ratings:
    """Returns the ratings of a MovieLens `ratings.csv`, in the order of the file."""
    table = pyarrow.csv.read_csv(path)
    return Ratings(
        user_ids=table["userId"].to_numpy().astype(np.int64),
        item_ids=table["movieId"].to_numpy().astype(np.int64),
        scores=table["rating"].to_numpy().astype(np.float64),
        timestamps=table["timestamp"].to_numpy().astype(np.int64),
    )


def split_timestamp(timestamps: npt.NDArray[np.int64], newest_fraction: float) -> int:
    """Returns the first timestamp of the newest part.

    Ratings of the same second stay together, so the split does not depend on the order of the file.

    Units: seconds since 1970-01-01 UTC.
    """
    newest_rows = round(len(timestamps) * newest_fraction)
    return int(np.sort(timestamps)[len(timestamps) - newest_rows])


def rmse(predicted: Scores, actual: Scores) -> float:
    """Returns the root of the mean squared error."""
    return float(np.sqrt(np.mean((predicted.astype(np.float64) - actual) ** 2)))


def mae(predicted: Scores, actual: Scores) -> float:
    """Returns the mean absolute error."""
    return float(np.mean(np.abs(predicted.astype(np.float64) - actual)))


def metrics(predicted: Scores, actual: Scores) -> dict[str, float]:
    """Returns RMSE and MAE, rounded to six decimals for the record."""
    return {"rmse": round(rmse(predicted, actual), 6), "mae": round(mae(predicted, actual), 6)}


def item_mean_scores(training: Ratings, item_ids: Ids) -> npt.NDArray[np.float64]:
    """Returns each item's mean rating in `training`; for unknown items the global mean."""
    table = lookup_table(training.item_ids)
    training_rows = lookup_rows(table, training.item_ids)
    means = np.full(rows_count(table), training.scores.mean())
    sums = np.bincount(training_rows, weights=training.scores, minlength=len(means))
    counts = np.bincount(training_rows, minlength=len(means))
    np.divide(sums, counts, out=means, where=counts > 0)
    return means[lookup_rows(table, item_ids)]


def lookup_table(ids: Ids) -> LookupTable:
    """Returns the dense table from a raw id to its row; unknown ids map to `UNKNOWN_ROW`.

    Both ends of the table are unknown, so an id clipped to the table's range is unknown too.

    Shape: (largest id + 2,)
    """
    known_ids = np.unique(ids)
    if known_ids[0] < 1:
        raise ValueError(f"ids must be at least 1, got {known_ids[0]}")
    table = np.full(known_ids[-1] + 2, UNKNOWN_ROW, dtype=np.int32)
    table[known_ids] = np.arange(1, len(known_ids) + 1)
    return table


def lookup_rows(table: LookupTable, ids: Ids) -> LookupTable:
    """Returns the row of each id, as the graph's Clip and Gather do."""
    return table[np.clip(ids, 0, len(table) - 1)]


def rows_count(table: LookupTable) -> int:
    """Returns the number of rows in the table, including the unknown row."""
    return int(table.max()) + 1


def train(training: Ratings, *, seed: int, epochs_max: int) -> tuple[Parameters, int]:
    """Returns the parameters fitted to all of `training`, and the number of epochs.

    The newest slice of `training` selects the number of epochs; then all of it is fitted again.
    """
    validation_at = split_timestamp(training.timestamps, VALIDATION_FRACTION)
    is_validation = training.timestamps >= validation_at
    validation = training.where(is_validation)

    validation_rmse = [
        rmse(torch_scores(parameters, validation.user_ids, validation.item_ids), validation.scores)
        for parameters in itertools.islice(
            fit_epochs(training.where(~is_validation), seed=seed), epochs_max
        )
    ]
    epochs_count = 1 + int(np.argmin(validation_rmse))
    print(f"validation rmse {min(validation_rmse):.4f} after epoch {epochs_count}")

    *_, parameters = itertools.islice(fit_epochs(training, seed=seed), epochs_count)
    return parameters, epochs_count


def fit_epochs(training: Ratings, *, seed: int) -> Iterator[Parameters]:
    """Yields the parameters after each epoch, without end; all share the same weights."""
    import torch

    # One thread and one generator: the same seed gives the same bytes.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(seed)

    vocabulary = Vocabulary(lookup_table(training.user_ids), lookup_table(training.item_ids))
    mean_score = float(np.float32(training.scores.mean()))
    weights = {
        **tower_weights("user", rows_count(vocabulary.user_lookup), generator),
        **tower_weights("item", rows_count(vocabulary.item_lookup), generator),
    }
    optimizer = torch.optim.Adam(weights.values(), lr=LEARNING_RATE)

    item_rows_array = lookup_rows(vocabulary.item_lookup, training.item_ids)
    ratings_per_item = np.bincount(item_rows_array)[item_rows_array]
    item_dropout = torch.from_numpy(
        ITEM_DROPOUT_RATINGS / (ITEM_DROPOUT_RATINGS + ratings_per_item)
    )
    user_rows = torch.from_numpy(lookup_rows(vocabulary.user_lookup, training.user_ids))
    item_rows = torch.from_numpy(item_rows_array)
    targets = torch.from_numpy((training.scores - mean_score).astype(np.float32))
    row_count = len(targets)

    while True:
        for batch in torch.randperm(row_count, generator=generator).split(BATCH_ROWS):
            is_user_dropped = torch.rand(len(batch), generator=generator) < USER_DROPOUT
            is_item_dropped = torch.rand(len(batch), generator=generator) < item_dropout[batch]
            predicted = affinity(
                weights,
                user_rows[batch].masked_fill(is_user_dropped, UNKNOWN_ROW),
                item_rows[batch].masked_fill(is_item_dropped, UNKNOWN_ROW),
            )
            loss = (predicted - targets[batch]).square().mean() + penalty(weights) / row_count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield Parameters(vocabulary, mean_score, weights)


def tower_weights(side: str, rows: int, generator: "torch.Generator") -> "dict[str, torch.Tensor]":
    """Returns the initial weights of one tower, `side` being `user` or `item`."""
    import torch

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).requires_grad_()

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, requires_grad=True)

    return {
        f"{side}_embedding": normal(rows, EMBEDDING_WIDTH, scale=0.1),
        f"{side}_hidden_weight": normal(
            EMBEDDING_WIDTH, HIDDEN_WIDTH, scale=1 / math.sqrt(EMBEDDING_WIDTH)
        ),
        f"{side}_hidden_bias": zeros(HIDDEN_WIDTH),
        # A small last layer starts the dot product near zero, so that the biases learn first.
        f"{side}_output_weight": normal(
            HIDDEN_WIDTH, EMBEDDING_WIDTH, scale=0.3 / math.sqrt(HIDDEN_WIDTH)
        ),
        f"{side}_output_bias": zeros(EMBEDDING_WIDTH),
        f"{side}_bias": zeros(rows),
    }


def affinity(
    weights: "dict[str, torch.Tensor]", user_rows: "torch.Tensor", item_rows: "torch.Tensor"
) -> "torch.Tensor":
    """Returns the distance of each predicted score from the mean score.

    Shape: (rows,)
    """
    import torch

    def tower(side: str, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.addmm(
            weights[f"{side}_hidden_bias"],
            weights[f"{side}_embedding"][rows],
            weights[f"{side}_hidden_weight"],
        ).relu()
        return torch.addmm(weights[f"{side}_output_bias"], hidden, weights[f"{side}_output_weight"])

    dot_product = (tower("user", user_rows) * tower("item", item_rows)).sum(dim=1)
    return dot_product + weights["user_bias"][user_rows] + weights["item_bias"][item_rows]


def penalty(weights: "dict[str, torch.Tensor]") -> "torch.Tensor":
    """Returns the shrinkage of the whole model, in squared score summed over ratings."""
    import torch

    def squared_norm(name: str) -> torch.Tensor:
        return weights[f"user_{name}"].square().sum() + weights[f"item_{name}"].square().sum()

    return (
        BIAS_SHRINKAGE_RATINGS * squared_norm("bias")
        + EMBEDDING_SHRINKAGE_RATINGS * squared_norm("embedding")
        + squared_norm("hidden_weight")
        + squared_norm("output_weight")
    )


def torch_scores(parameters: Parameters, user_ids: Ids, item_ids: Ids) -> npt.NDArray[np.float32]:
    """Returns the scores of raw ids, computed by torch."""
    import torch

    vocabulary, mean_score, weights = parameters
    with torch.no_grad():
        scores = mean_score + affinity(
            weights,
            torch.from_numpy(lookup_rows(vocabulary.user_lookup, user_ids)),
            torch.from_numpy(lookup_rows(vocabulary.item_lookup, item_ids)),
        )
        return scores.clamp(SCORE_MIN, SCORE_MAX).numpy()


def build_model(parameters: Parameters) -> "onnx.ModelProto":
    """Returns the graph from raw ids to scores, with both towers.

    Shape: `user_id`, `item_id`, `score`: (rows,)
    Dtype: ids int64, score float32.
    """
    from onnx import TensorProto, helper, numpy_helper

    vocabulary, mean_score, weights = parameters
    constants: dict[str, npt.ArrayLike] = {
        "user_lookup": vocabulary.user_lookup,
        "item_lookup": vocabulary.item_lookup,
        **{name: weight.detach().numpy() for name, weight in weights.items()},
        "id_min": np.int64(0),
        "user_id_max": np.int64(len(vocabulary.user_lookup) - 1),
        "item_id_max": np.int64(len(vocabulary.item_lookup) - 1),
        "mean_score": np.float32(mean_score),
        "score_min": np.float32(SCORE_MIN),
        "score_max": np.float32(SCORE_MAX),
        "width_axis": np.array([1], dtype=np.int64),
    }

    nodes = []

    def add(operator: str, inputs: list[str], output: str, **attributes: int) -> None:
        nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))

    for side in ("user", "item"):
        add("Clip", [f"{side}_id", "id_min", f"{side}_id_max"], f"{side}_id_clipped")
        add("Gather", [f"{side}_lookup", f"{side}_id_clipped"], f"{side}_row")
        add("Gather", [f"{side}_embedding", f"{side}_row"], f"{side}_embedded")
        hidden = [f"{side}_embedded", f"{side}_hidden_weight", f"{side}_hidden_bias"]
        add("Gemm", hidden, f"{side}_hidden")
        add("Relu", [f"{side}_hidden"], f"{side}_activated")
        vector = [f"{side}_activated", f"{side}_output_weight", f"{side}_output_bias"]
        add("Gemm", vector, f"{side}_vector")
        add("Gather", [f"{side}_bias", f"{side}_row"], f"{side}_offset")
    add("Mul", ["user_vector", "item_vector"], "product")
    add("ReduceSum", ["product", "width_axis"], "dot_product", keepdims=0)
    add("Sum", ["dot_product", "user_offset", "item_offset", "mean_score"], "score_unclipped")
    add("Clip", ["score_unclipped", "score_min", "score_max"], "score")

    graph = helper.make_graph(
        nodes,
        "two_tower",
        inputs=[
            helper.make_tensor_value_info("user_id", TensorProto.INT64, ["rows"]),
            helper.make_tensor_value_info("item_id", TensorProto.INT64, ["rows"]),
        ],
        outputs=[helper.make_tensor_value_info("score", TensorProto.FLOAT, ["rows"])],
        initializer=[
            numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
        ],
    )
    return helper.make_model(
        graph,
        producer_name="iskander/scripts/train_two_tower.py",
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 17)],
    )


def check_model(model_bytes: bytes, parameters: Parameters, heldout: Ratings) -> None:
    """Checks that the graph is valid and computes the same scores as torch.

    Raises:
        ValueError: A score differs from torch by more than 1e-5.
    """
    import onnx

    onnx.checker.check_model(onnx.load_from_string(model_bytes), full_check=True)

    limits = np.iinfo(np.int64)
    edge_ids = np.array([limits.min, -1, 0, 1, 2**31, 2**32 + 1, limits.max], dtype=np.int64)
    user_ids = np.concatenate([heldout.user_ids, edge_ids])
    item_ids = np.concatenate([heldout.item_ids, edge_ids[::-1]])
    difference = np.abs(
        run_model(model_bytes, user_ids, item_ids) - torch_scores(parameters, user_ids, item_ids)
    )
    if not difference.max() <= 1e-5:
        raise ValueError(f"the graph's scores differ from torch by {difference.max()}")


def run_model(model_bytes: bytes, user_ids: Ids, item_ids: Ids) -> npt.NDArray[np.float32]:
    """Returns the scores of raw ids, computed by ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model_bytes, options, providers=["CPUExecutionProvider"])
    scores: npt.NDArray[np.float32]
    (scores,) = session.run(["score"], {"user_id": user_ids, "item_id": item_ids})
    return scores


if __name__ == "__main__":
    sys.exit(main())
