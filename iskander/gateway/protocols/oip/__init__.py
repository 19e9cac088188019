"""Open Inference Protocol over gRPC, with extensions of Triton."""
