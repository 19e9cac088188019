"""Batch scoring of files and tables: `iskander score`.

A job is planned into units, each unit is one stream to the server and one staged output file, and
all staged files are committed together. Imports `iskander.client`, `iskander.errors`, pyarrow and
optional libraries of table formats; never the server's packages.
Runs in: the operator's tool.
"""
