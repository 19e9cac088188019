"""What tests of real processes share: servers, workers, raw calls, small models, leak checks."""
