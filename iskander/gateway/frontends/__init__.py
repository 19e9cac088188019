"""One protocol a file, each the same two translations: wire to request, result to wire."""
