"""Models with inputs, served over three protocols and compared with ONNX Runtime in process.

`cases` reads the models of ONNX's backend test suite, `clients` sends named tensors over gRPC, HTTP
and Flight, `reference` runs them in process, `comparison` runs a list of cases on gateways and
judges each, `table` writes the verdicts to `README.md`, and `run` is the command.
"""
