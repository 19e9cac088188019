"""Contracts in other forms: JSON schema, MLflow signature, text."""
