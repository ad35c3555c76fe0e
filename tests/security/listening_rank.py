"""A rank that joins the rendezvous and records the addresses it and its launcher listen on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

LISTEN = "0A"


def listening_addresses(pid: int) -> list[str]:
    """Hexadecimal local addresses of the listening TCP sockets of a process."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:
            continue
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1].split(":")[0] for row in rows if row[3] == LISTEN and row[9] in inodes]


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    found = {
        "rank": listening_addresses(os.getpid()),
        "launcher": listening_addresses(os.getppid()),
    }
    Path(directory, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
