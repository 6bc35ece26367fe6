"""Packed weights kept between starts: one file per model and weight format, read by the next start.

A file is in safetensors format. It is read, not mapped: a file's pages are small (`large_pages`), and what a process
has read nobody changes under it. Writers write beside a file and move theirs over it, so starts at the same time do no
harm. What a file was made from, where its matrices lie and a CRC of its bytes are under one hash; whatever does not fit
is packed anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from blockpilot.one_thread import one_thread
from blockpilot.policies.atomic import replacing
from blockpilot_kernels.packed_decoder import LAYOUT, large_pages

ENVIRONMENT, OFF = "BLOCKPILOT_CACHE", "off"
LIMIT = 8 << 30  # bytes of all files; the least recently used go first
_HEADER_LIMIT, _ABANDONED_SECONDS = 16 << 20, 3600
_NAME = re.compile(r"((?:target|drafter)-[0-9a-f]{32})\.v(\d+)\.packed")
_TEMPORARY = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]+\.tmp")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packed:
    """Packed weights.

    Attributes:
        blob: [n] uint8. words: lists of integers that say where in it what lies, by name.
    """

    blob: Tensor
    words: Mapping[str, list[int]]


@dataclass(frozen=True)
class PackedKey:
    """What packed bytes are made from.

    Attributes:
        kind: "target" or "drafter". model: fingerprints, weight format, dtype, path: they name the file.
        source: state of the files that were read; another one makes a file of the same name stale.
    """

    kind: str
    model: tuple[str, ...]
    source: str

    @property
    def file(self) -> str:
        """Name of its file, for the present layout."""
        return (
            f"{self.kind}-{hashlib.sha256(json.dumps(self.model).encode()).hexdigest()[:32]}.v{LAYOUT}.packed"
        )


def cache_folder() -> Path | None:
    """`$BLOCKPILOT_CACHE`, `$XDG_CACHE_HOME/blockpilot` or `~/.cache/blockpilot`; None: off, or there is no home.

    Raises:
        ValueError: BLOCKPILOT_CACHE is neither "off" nor an absolute path.
    """
    named, xdg = os.environ.get(ENVIRONMENT), os.environ.get("XDG_CACHE_HOME", "")
    if named == OFF:
        return None
    if named:
        folder = os.path.expanduser(named)
        if not os.path.isabs(folder):
            raise ValueError(
                f"{ENVIRONMENT}: expected {OFF!r} or the absolute path of a folder, got {named!r}"
            )
        return Path(folder)
    if not os.path.isabs(xdg) and os.environ.get("HOME", "~") == "":
        return None
    base = xdg if os.path.isabs(xdg) else os.path.expanduser("~/.cache")
    return Path(base) / "blockpilot" if os.path.isabs(base) else None


def cached(key: PackedKey | None, pack: Callable[[], Packed]) -> Packed:
    """The weights of `key` from the cache, or what `pack` makes, written there for the next start.

    A cache that cannot be used costs one line, and time; None is never cached. `pack` runs on one thread: it is many
    small operations.
    """
    pack = one_thread()(pack)
    folder = cache_folder() if key is not None else None
    if key is None or folder is None:
        return pack()
    path = folder / key.file
    try:
        return _read(path, key)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        _log.warning("blockpilot: weights are packed at every start, %s cannot be read: %s", path, error)
        return pack()
    except ValueError as error:
        _log.warning("blockpilot: weights are packed anew, %s: %s", path, error)
    packed = pack()
    try:
        _write(path, key, packed)
    except OSError as error:
        _log.warning(
            "blockpilot: weights are packed at every start, %s cannot keep them: %s (%s=%s ends this line)",
            folder,
            error,
            ENVIRONMENT,
            OFF,
        )
    else:
        with suppress(OSError):
            _make_room(path)
    return packed


def contents(folder: Path) -> list[os.stat_result]:
    """Of every file with packed weights in a folder."""
    return [state for _, state in _entries(folder, _NAME)]


def _read(path: Path, key: PackedKey) -> Packed:
    """Raises OSError where a file cannot be read, ValueError where it is not what `key` says."""
    # Opened without waiting: a pipe of that name would never answer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        state = os.fstat(file.fileno())
        size = state.st_size
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _HEADER_LIMIT):
            raise ValueError(f"expected a header of {length} bytes, found a file of {size}")
        try:
            found = json.loads(file.read(length))["__metadata__"]
            words, seal, source, stop = (json.loads(found[n]) for n in ("words", "seal", "source", "size"))
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a header of packed weights: {error!r}") from error
        if type(stop) is not int:
            raise ValueError(f"not a header of packed weights: size {stop!r}")
        if 8 + length + stop != size or stop % 8 or stop == 0:
            raise ValueError(f"expected {stop} bytes behind a header of {length}, found a file of {size}")
        if source != key.source:
            raise ValueError("the cached file was made from files of another size or time")
        blob = large_pages(stop)
        if file.readinto(blob.numpy().data) != stop:
            raise ValueError(f"expected {stop} bytes of weights, the file ended before")
    if seal != _seal(key, words, blob):
        raise ValueError("damaged, or of another model")
    with suppress(OSError):
        os.utime(path)  # the least recently used file goes first
    return Packed(blob, words)


def _write(path: Path, key: PackedKey, packed: Packed) -> None:
    size = packed.blob.numel()
    if size > LIMIT:
        raise OSError(errno.EFBIG, f"{size} bytes are more than the {LIMIT} of the whole cache")
    if not path.parent.exists():
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    if (free := shutil.disk_usage(path.parent).free) < 2 * size:
        raise OSError(errno.ENOSPC, f"{size} bytes would fill more than half of the {free} that are free")
    metadata = {
        "words": packed.words,
        "source": key.source,
        "size": size,
        "seal": _seal(key, packed.words, packed.blob),
    }
    header = {
        "__metadata__": {name: json.dumps(value) for name, value in metadata.items()},
        "blob": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
    }
    text = json.dumps(header).encode()
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(packed.blob.numpy().data)


def _seal(key: PackedKey, words: Mapping[str, list[int]], blob: Tensor) -> str:
    """Hex SHA-256 of what a file is, its words, and the CRC-32 of its bytes."""
    parts = [LAYOUT, key.kind, key.model, key.source, words, blob.numel(), zlib.crc32(blob.numpy().data)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _make_room(path: Path) -> None:
    """Delete older layouts of what was written to `path`, leftovers of writers that died, and what exceeds `LIMIT`."""
    folder, stem = path.parent, path.name.partition(".")[0]
    now = time.time()
    for file, state in _entries(folder, _TEMPORARY):
        if now - state.st_mtime > _ABANDONED_SECONDS:
            file.unlink(missing_ok=True)
    total = 0
    for file, state in sorted(_entries(folder, _NAME), key=lambda e: e[1].st_mtime, reverse=True):
        match = _NAME.fullmatch(file.name)
        assert match is not None
        old = match[1] == stem and int(match[2]) < LAYOUT
        total += 0 if old else state.st_size
        if old or (total > LIMIT and file != path):
            file.unlink(missing_ok=True)


def _entries(folder: Path, names: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """Files of a folder with names of our own making; those of anybody else are not seen."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if names.fullmatch(file.name):
            with suppress(OSError):  # another process deleted it
                state = file.lstat()
                if stat.S_ISREG(state.st_mode):
                    yield file, state
