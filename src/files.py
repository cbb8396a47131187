"""Files that are wholly there or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, shared: bool = False) -> Iterator[Path]:
    """Where to write a file that takes its place, whole, when the block ends; not when that raises.

    It does not wait for the disk, since training may: use `sync` where a file must outlive the machine.

    Args:
        path: the file; its folder is made.
        shared: several processes may write it at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part" if shared else f"{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
