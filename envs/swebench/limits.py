"""Limits of sandboxes in which test suites run; `examples/swebench.yaml` has the same ones for training."""

from pearl.config.environment import SandboxConfig

LIMITS = SandboxConfig(
    memory_mb=4096, processes=256, command_s=60.0, cpu_s=1800, file_mb=64, disk_mb=1024, output_chars=10_000
)
