"""OpenTelemetry traces: sampling, records of requests, and the process that exports spans."""
