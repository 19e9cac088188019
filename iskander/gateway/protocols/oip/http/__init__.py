"""Open Inference Protocol over HTTP: routes, bodies, JSON and binary tensors."""
