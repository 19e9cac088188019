"""What a model takes and returns, and how a file beside the model says so."""
