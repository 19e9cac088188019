"""Model loading: files, weights, signatures, and the thread that loads."""
