"""Model loading: files, signatures, weights, and the loading thread."""
