"""Whose files may be believed: what is read as root and acted upon must not be another user's to write.

Root believes root only; everybody else believes root and himself. A folder counts with all that lead to it: who may
write one of them can put another in its place. A sticky folder (/tmp) is harmless: there one may not.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

MOST_BYTES = 1 << 20


class Distrusted(Exception):
    """Somebody else may have written it; the message says who."""


def check_folder(folder: Path) -> None:
    """Raises Distrusted for a folder that somebody else could have filled. What is not there yet is not looked at."""
    real = Path(os.path.realpath(folder))
    for place in (real, *real.parents):
        try:
            found = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        _check(place, found, sticky_is_enough=place != real)


def read_text(path: Path) -> str:
    """A file's text, by the descriptor that was checked. Raises Distrusted, OSError, ValueError."""
    check_folder(path.parent)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Distrusted(f"{path} is not an ordinary file")
        _check(path, found)
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES} bytes")
    return data.decode()


def _check(place: Path, found: os.stat_result, *, sticky_is_enough: bool = False) -> None:
    me = os.geteuid()
    if found.st_uid not in (0, me):
        raise Distrusted(f"{place} belongs to user {user_name(found.st_uid)}")
    others = stat.S_IWOTH | (stat.S_IWGRP if me == 0 else 0)
    if found.st_mode & others and not (sticky_is_enough and found.st_mode & stat.S_ISVTX):
        raise Distrusted(f"others may write {place} (mode {stat.S_IMODE(found.st_mode):o})")


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
