"""Model versions: scan of the repository folder, routing, loads and unloads."""
