"""Files that are replaced whole: a full disk or an interrupt leaves the file that was there."""

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from zoo.errors import FileError, file_errors_as


@contextlib.contextmanager
def replaced_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Yields a new file for bytes, which takes the place of the one at `path` at the end.

    It lies beside that until then. What is no regular file, such as /dev/stdout, is written itself.

    Raises:
        FileError: it cannot be written; the file that was there stays as it is.
    """
    # a link stays one
    whole = Path(path).resolve()
    with file_errors_as(FileError, path):
        if whole.exists() and not whole.is_file():
            with whole.open("wb") as file:
                yield file
            return
        new = whole.with_name(f".{whole.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            with new.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if whole.exists():
                shutil.copymode(whole, new)
            new.replace(whole)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def write_file(path: str | Path, content: str | bytes) -> None:
    """Writes a file whole, text as UTF-8.

    Raises:
        FileError: as `replaced_file` does.
    """
    with replaced_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
