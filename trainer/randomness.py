"""The states of all random number generators of a process, as bytes without pickle."""

from __future__ import annotations

import random

import msgpack
import numpy as np
import torch


def capture() -> bytes:
    """State of python's, numpy's and torch's generators, of the process's GPU too if it has one."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return msgpack.packb(
        {
            "python": [version, list(words), gauss],
            "numpy": [kind, np.asarray(keys).tobytes(), position, has_gauss, cached],
            "torch": torch.get_rng_state().numpy().tobytes(),
            "cuda": torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else None,
        }
    )


def restore(data: bytes) -> None:
    """Inverse of `capture`; a GPU state is left out where there is no GPU, and the other way round."""
    state = msgpack.unpackb(data)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
