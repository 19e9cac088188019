"""Parts without knowledge of the product: time, encodings, files, logs, figures."""
