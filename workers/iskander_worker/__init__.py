"""Worker process: loads models and runs batches; it opens no network socket."""
