"""Arrays of a batch: inputs and results in shared memory, and the steps around a model."""
