"""Writes the quickstart's sample: held-out MovieLens ratings with film titles.

    python scripts/make_sample.py --ratings ratings.csv --movies movies.csv

Every n-th rating by time after the model's training data, for users and films in that data.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

MODEL = Path(__file__).resolve().parent.parent / "configs" / "models" / "movielens-two-tower"
ROWS = 2048


def main() -> None:
    """Read, select and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ratings", type=Path, required=True)
    parser.add_argument("--movies", type=Path, required=True)
    arguments = parser.parse_args()
    split = json.loads((MODEL / "1" / "heldout.json").read_text())["split_timestamp"]
    ratings = pa.csv.read_csv(arguments.ratings)
    training = ratings.filter(pc.field("timestamp") < split)
    heldout = ratings.filter(pc.field("timestamp") >= split).sort_by("timestamp")
    heldout = heldout.filter(pc.is_in(heldout["movieId"], pc.unique(training["movieId"])))
    heldout = heldout.filter(pc.is_in(heldout["userId"], pc.unique(training["userId"])))
    step = max(len(heldout) // ROWS, 1)
    selected = heldout.take(pa.array(range(0, min(len(heldout), ROWS * step), step)))
    titles = pa.csv.read_csv(arguments.movies).select(["movieId", "title"])
    titled = selected.join(titles, "movieId").sort_by("timestamp")
    sample = pa.table(
        {
            "user_id": titled["userId"].cast(pa.int64()),
            "item_id": titled["movieId"].cast(pa.int64()),
            "rating": titled["rating"].cast(pa.float32()),
            "title": titled["title"].cast(pa.string()),
        }
    )
    pq.write_table(sample, MODEL / "sample.parquet", compression="zstd")
    print(f"{len(sample)} rows in {MODEL / 'sample.parquet'}")


if __name__ == "__main__":
    main()
