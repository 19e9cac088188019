"""Scoring of Spark DataFrames, in batch jobs and in Structured Streaming.

    scorer  ->  checks on the driver  ->  DataFrame.mapInArrow  ->  Python workers of Spark
                                                                ->  the server of their node, or
                                                                    another one

Spark is not imported: a DataFrame's own types are used. Imports `iskander.client`, the parts of
`iskander.ray` without Ray, and pyarrow; never the server's packages.
Runs in: drivers and Python workers of Spark.
"""

from iskander.spark.scoring import Scorer, scorer

__all__ = ["Scorer", "scorer"]
