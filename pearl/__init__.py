"""PEARL: asynchronous GRPO for LLM agents on GPUs that come and go."""

__version__ = "0.1.0"
