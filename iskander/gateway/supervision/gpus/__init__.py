"""NVIDIA GPUs: inventory, memory budgets, and readings of NVML by another process."""
