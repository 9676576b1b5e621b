"""Start several processes of one program on this machine, as a cluster would start one on each host.

    python experiments/launch/local.py --processes 2 --devices 2 -- jaxrl train --prompts prompts.jsonl --output runs/a

Each process gets the command with `--coordinator localhost:PORT --processes N --process I` added, which `jaxrl train`
gives to jax.distributed.initialize. On CPUs (the default) it has --devices virtual devices, and the processes
communicate over Gloo; with --platform cuda it has that many of the machine's GPUs. --dry-run prints the commands.

Lines of output begin with the number of their process. When a process fails, the others get SIGTERM, and after --grace
seconds SIGKILL. SIGTERM and Ctrl-C are passed on. The exit status is that of the first process that failed, else 0.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any


def environment(platform: str, process: int, devices: int, before: str = "") -> dict[str, str]:
    """What a process's environment has beyond this one's. before: XLA_FLAGS that are set already."""
    if platform == "cpu":
        flags = f"{before} --xla_force_host_platform_device_count={devices}".strip()
        return {"JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "XLA_FLAGS": flags}
    own = range(process * devices, (process + 1) * devices)
    return {"JAX_PLATFORMS": platform, "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, own))}


def command_of(command: list[str], coordinator: str, processes: int, process: int) -> list[str]:
    """The command of one process."""
    return [*command, "--coordinator", coordinator, "--processes", str(processes), "--process", str(process)]


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def _show(stream: IO[str], process: int) -> None:
    for line in stream:
        print(f"[{process}] {line}", end="", flush=True)


def run(commands: list[list[str]], environments: list[dict[str, str]], grace: float) -> int:
    """Run all commands to their end; returns the exit status."""
    started = [
        subprocess.Popen(
            command, env={**os.environ, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,  # a terminal's Ctrl-C comes through `pass_on`, once
        )
        for command, more in zip(commands, environments, strict=True)
    ]  # fmt: skip
    readers = [
        threading.Thread(target=_show, args=(process.stdout, index), daemon=True)
        for index, process in enumerate(started)
    ]
    for reader in readers:
        reader.start()

    def pass_on(number: int, frame: Any) -> None:
        for process in started:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    status, deadline = 0, None
    try:
        while None in (statuses := [process.poll() for process in started]):
            failed = next((one for one in statuses if one), 0)
            if failed and not status:
                status, deadline = failed, time.monotonic() + grace
                pass_on(signal.SIGTERM, None)
            if deadline is not None and time.monotonic() > deadline:
                pass_on(signal.SIGKILL, None)
            time.sleep(0.05)
    finally:
        pass_on(signal.SIGKILL, None)
        for number, handler in before.items():
            signal.signal(number, handler)
    for reader in readers:
        reader.join()
    status = status or next((process.returncode for process in started if process.returncode), 0)
    return 128 - status if status < 0 else status  # ended by a signal: as shells say it


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments, and run or print the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1, help="devices of each process")
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--port", type=int, default=0, help="of the coordinator; default: any that is free")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    parser.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args(arguments)
    if args.processes < 1 or args.devices < 1:
        parser.error("--processes and --devices are at least 1")
    coordinator = f"localhost:{args.port or free_port()}"
    commands = [command_of(args.command, coordinator, args.processes, i) for i in range(args.processes)]
    flags = os.environ.get("XLA_FLAGS", "")
    environments = [environment(args.platform, i, args.devices, flags) for i in range(args.processes)]
    if args.dry_run:
        for command, more in zip(commands, environments, strict=True):
            print(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in more.items()), shlex.join(command)]))
        return 0
    return run(commands, environments, args.grace)


if __name__ == "__main__":
    sys.exit(main())
