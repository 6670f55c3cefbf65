"""What lets the published SGLang wheel run on a machine without a GPU: two stand-ins, and a cheaper start.

Two imports fail there. `sgl_kernel` is published with CUDA objects only; SGLang takes its own PyTorch paths as long as
`torch.ops.sgl_kernel.convert_weight_packed` is missing, but a few names must still be importable. `torchvision` is
imported for image transforms that a text model never calls, and the published one does not load beside a CPU torch.

`install` runs before the first import of sglang in every process of an engine (see `launch`), and never on a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH = "SGLANG_USE_CPU_ENGINE"
"""SGLang's own variable: with `1` it takes the CPU for its device."""

_UNAVAILABLE = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
"""Kernels of speculative decoding: imported always, called only with it."""


def wanted() -> bool:
    return os.environ.get(SWITCH) == "1"


def install() -> None:
    """Put the stand-ins into `sys.modules` where the real modules are missing."""
    if "sgl_kernel" not in sys.modules:
        _install_sgl_kernel()
    if not _torchvision_available():
        _install_torchvision()


def fork_children() -> None:
    """Let SGLang fork its scheduler and detokenizer where it asks for spawn.

    They then share the libraries that the launcher has imported: half the time to start, a third less memory. Not for a
    GPU, whose context does not survive a fork. The launcher has no thread by then that holds a lock.
    """
    set_start_method = multiprocessing.set_start_method

    def fork(method: str | None, force: bool = False) -> None:
        set_start_method("fork", force=True)

    multiprocessing.set_start_method = fork


def assign_req_to_token_pool(rows: Any, pool: Any, starts: Any, ends: Any, locations: Any, _stride: int) -> None:
    """Scatter consecutive runs of `locations` into `pool[row, start:end]`, one run per request."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=False):
        pool[row, start:end] = locations[taken : taken + end - start].to(pool.dtype)
        taken += end - start


def _install_sgl_kernel() -> None:
    kernels = {name: _unavailable(name) for name in _UNAVAILABLE}
    _module("sgl_kernel", assign_req_to_token_pool_cpu=assign_req_to_token_pool, **kernels)


def _unavailable(name: str) -> Any:
    def kernel(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name}: speculative decoding needs sgl_kernel, which has no CPU build")

    return kernel


def _torchvision_available() -> bool:
    # transformers keeps its first answer, so it must be asked before a stand-in could be found.
    from transformers.utils.import_utils import is_torchvision_available

    return bool(is_torchvision_available())


def _install_torchvision() -> None:
    names = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
    mode = type("InterpolationMode", (), {name: name.lower() for name in names})
    functional = _module("torchvision.transforms.functional", InterpolationMode=mode)
    functional_v2 = _module("torchvision.transforms.v2.functional")
    v2 = _module("torchvision.transforms.v2", functional=functional_v2)
    transforms = _module("torchvision.transforms", functional=functional, v2=v2, InterpolationMode=mode)
    _module("torchvision", transforms=transforms)


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(members, __version__="0+pearl.cpu")
    sys.modules[name] = module
    return module
