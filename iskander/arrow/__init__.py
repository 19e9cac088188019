"""Arrow types and arrays as tensors: IPC headers, casts, ranks."""
