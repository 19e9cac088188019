"""Train a classifier on scikit-learn's breast-cancer table and write it as ONNX to `1/`."""

import sys
from pathlib import Path

from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

FEATURES = ("radius", "texture", "perimeter", "area", "smoothness")
"""Means of a cell nucleus; the first columns of the table."""


def train() -> Pipeline:
    """Train a pipeline on the first columns of the table."""
    rows, classes = load_breast_cancer(return_X_y=True)
    model = make_pipeline(StandardScaler(), LogisticRegression())
    return model.fit(rows[:, : len(FEATURES)], classes)


def main(folder: Path) -> None:
    """Write the model: one input for each feature, a label, and a map of probabilities."""
    types = [(name, FloatTensorType([None, 1])) for name in FEATURES]
    model = to_onnx(train(), initial_types=types)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "1")
