"""The lane of a model version: admission, queue, policies and batches."""
