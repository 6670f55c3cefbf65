"""The command line of a server, and what is refused before one starts."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from actors.sglang import args, transfer
from actors.sglang.listen import KV_HOST
from pearl.config.engine import EngineConfig
from pearl.config.model import ModelConfig
from pearl.errors import UserError

CPU = EngineConfig(device="cpu")
MODEL = ModelConfig(path="tiny-random-llama", dtype="float32")


def plan(
    directory: Path, engine: EngineConfig = CPU, model: ModelConfig = MODEL, kv: transfer.KvEndpoint | None = None
) -> args.ServerPlan:
    return args.plan_server(engine, model, directory, port=1234, seed=7, kv=kv)


def test_every_typed_key_reaches_the_command_line(tiny_model: Path) -> None:
    engine = EngineConfig(device="cpu", max_total_tokens=4096, max_running_requests=3, disable_radix_cache=True)
    line = " ".join(plan(tiny_model, engine).flags)
    for part in (
        f"--model-path {tiny_model}", "--dtype float32", "--context-length 2048", "--max-total-tokens 4096",
        "--max-running-requests 3", "--disable-radix-cache", "--random-seed 7", "--port 1234", "--host 127.0.0.1",
        "--device cpu", "--attention-backend torch_native", "--skip-server-warmup",
    ):  # fmt: skip
        assert part in line


def test_extra_arguments_come_last(tiny_model: Path) -> None:
    engine = EngineConfig(device="cpu", extra_args=("--schedule-policy", "fcfs"))
    assert plan(tiny_model, engine).flags[-2:] == ("--schedule-policy", "fcfs")


@pytest.mark.parametrize("extra", ["--context-length", "--context_length=9", "--context-len", "--dtype=half", "--tp"])
def test_repeated_key_names_the_key(tiny_model: Path, extra: str) -> None:
    with pytest.raises(UserError, match=r"extra_args repeats .* sets\. Set (model|engine)\."):
        plan(tiny_model, EngineConfig(device="cpu", extra_args=(extra,)))


def test_flags_that_pearl_decides_are_refused(tiny_model: Path) -> None:
    with pytest.raises(UserError, match=r"--port=9.*PEARL decides"):
        plan(tiny_model, EngineConfig(device="cpu", extra_args=("--port=9",)))


def test_tensor_parallel_on_a_cpu_is_refused(tiny_model: Path) -> None:
    with pytest.raises(UserError, match=r"tensor_parallel = 2 on a CPU"):
        plan(tiny_model, EngineConfig(device="cpu", tensor_parallel=2))


def test_context_beyond_the_model_is_refused(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="context_tokens = 9000 is above the 4096 positions"):
        plan(tiny_model, model=ModelConfig(path="tiny-random-llama", context_tokens=9000))


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="device = cuda"):
        args.resolve_device(EngineConfig(device="cuda"))
    assert args.resolve_device(EngineConfig(device="auto")) == "cpu"


def test_gpu_only_flags(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    made = plan(tiny_model, EngineConfig(tensor_parallel=2, mem_fraction_static=0.5))
    line = " ".join(made.flags)
    assert made.device == "cuda"
    assert "--enable-memory-saver" in line and "--mem-fraction-static 0.5" in line and "--tp-size 2" in line
    assert "--attention-backend" not in line
    assert "SGLANG_USE_CPU_ENGINE" not in made.environment


@pytest.mark.parametrize(
    ("package", "version", "what"),
    [
        ("sglang", None, "sglang is not installed"),
        ("sglang", "0.5.20", "0.5.20 is not supported; PEARL works with 0.5.21 to 0.5.23"),
        ("sglang", "0.6.0", "0.6.0 is not supported"),
        ("torch", "2.8.0+cpu", "needs torch 2.13 or newer, below 2.15"),
        ("torch", None, "torch is missing"),
    ],
)
def test_unsupported_versions(monkeypatch: pytest.MonkeyPatch, package: str, version: str | None, what: str) -> None:
    real = args._version
    monkeypatch.setattr(args, "_version", lambda name: version if name == package else real(name))
    with pytest.raises(UserError, match=what) as raised:
        args.check_versions()
    assert "pip install" in raised.value.remedy


KV = transfer.KvEndpoint("10.0.0.7", 9000, 1)


def test_engine_with_kv_transfer_starts_as_one_that_can_take_any_role(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "missing", lambda: None)
    made = plan(tiny_model, kv=KV)
    line = " ".join(made.flags)
    for part in (
        "--disaggregation-mode decode", "--enable-pd-role-switch", "--disaggregation-bootstrap-port 9000",
        "--disaggregation-transfer-backend mooncake_tcp", "--disaggregation-decode-enable-radix-cache",
    ):  # fmt: skip
        assert part in line
    assert "--host 127.0.0.1" in line, "the API stays on loopback"
    assert made.environment["SGLANG_HOST_IP"] == made.environment[KV_HOST] == "10.0.0.7"
    assert made.environment["GLOO_SOCKET_IFNAME"] == made.environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert "--disaggregation-mode" not in plan(tiny_model).flags


def test_kv_transfer_is_refused_where_it_cannot_work(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(transfer, "find_spec", lambda name: name)
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", absent)
        with pytest.raises(UserError, match=r"libibverbs\.so\.1.*apt-get install libibverbs1"):
            plan(tiny_model, kv=KV)
    monkeypatch.setattr(transfer, "missing", lambda: None)
    with pytest.raises(UserError, match="disable_radix_cache with prefill-decode"):
        plan(tiny_model, EngineConfig(device="cpu", disable_radix_cache=True), kv=KV)
