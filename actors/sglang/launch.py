"""The main module of an engine, as `python -m actors.sglang.launch <own flags> <flags of sglang.launch_server>`.

Whatever multiprocessing spawns imports the main module again before anything else, so what this module does at its top,
the CPU stand-ins and the address of KV transfer, holds in every process of an engine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from actors.sglang import cpu
from actors.sglang.leftovers import remove_shared_files_of_group
from actors.sglang.listen import KV_HOST, KeepOn

if cpu.wanted():
    cpu.install()
if KV_HOST in os.environ:
    sys.meta_path.insert(0, KeepOn(os.environ[KV_HOST]))

REMOVALS = 3

if __name__ == "__main__":
    # Who takes a host away signals every process there (Slurm does). That is a notice to the worker, which drains this
    # engine and then stops it. All processes of the engine inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def main(arguments: list[str]) -> None:
    """Serve until stopped. The process must lead a group of its own: that group dies with the owner.

    `--scratch` is the engine's temporary folder (also `TMPDIR`), which then has nobody else left to remove it.
    """
    from pearl.lifeline import end_with_owner

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--scratch", required=True)
    own, flags = parser.parse_known_args(arguments)

    def owner_gone() -> None:
        try:
            # What a child creates meanwhile keeps the folder; once it is gone nothing can be created in it.
            for _ in range(REMOVALS):
                shutil.rmtree(own.scratch, ignore_errors=True)
            remove_shared_files_of_group(os.getpgid(0))
        finally:
            os.killpg(os.getpgid(0), signal.SIGKILL)

    end_with_owner(own.lifeline_fd, owner_gone)

    # prometheus_client looks once, when it is imported, and our plugin imports it before SGLang says where metrics go.
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        metrics = Path(own.scratch) / "metrics"
        metrics.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)

    # Ranks of one host meet in a file; a TCPStore of torch would listen on every interface.
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{own.scratch}/ranks"

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if cpu.wanted():
        cpu.fork_children()
    try:
        run_server(prepare_server_args(flags))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
