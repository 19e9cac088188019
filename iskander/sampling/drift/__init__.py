"""Drift of a model's inputs and outputs: summaries of columns, compared with recorded ones.

Runs in the observer process. Gateways import only `report`, and load no sketch library.
"""
