"""Rates on a GPU: ONNX Runtime by itself, and a server with four clients."""
