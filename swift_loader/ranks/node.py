"""Names what processes of one node have in common, so that they find each other. Pure, apart from `this_node`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

__all__ = ["node_key", "this_node"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_NAMESPACES = ("pid", "mnt", "net")
"""Processes that share these can connect by an abstract Unix socket, and know each other by process id."""


def node_key(parts: Iterable[object]) -> bytes:
    """Return 16 bytes that depend on these parts alone. Other parts give other bytes."""
    digest = blake2b(digest_size=16)
    for part in parts:
        text = str(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


def this_node() -> bytes | None:
    """Return a key that processes have in common which can share memory: one boot, one user, the same namespaces.

    None if the system doesn't say, as elsewhere than on Linux.
    """
    try:
        namespaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in _NAMESPACES]
        return node_key([_BOOT_ID.read_text(encoding="ascii").strip(), os.geteuid(), *namespaces])
    except (AttributeError, OSError):
        return None
