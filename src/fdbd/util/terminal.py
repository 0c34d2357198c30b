"""Output to the terminal: text without control characters, and a Ctrl-C that is answered at
once."""

import contextlib
import os
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator

GRACE_SECONDS = 1.0
"""Seconds that an interrupted run has to stop in good order."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
_ONE_PRESS_SECONDS = 0.3
"""Signals that come within this time are one press of Ctrl-C: forked workers get the signal, too,
and write to the same pipe."""
_COMMANDS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of control and format characters (bidirectional overrides), surrogates and
separators."""


def printable(text: str) -> str:
    """The text on one line, with control characters, and bytes of file names that are not UTF-8,
    as escapes.

    >>> printable("caf\\x1b[31m\\udce9")
    'caf\\\\x1b[31m\\\\udce9'
    """
    if text.isascii() and text.isprintable():
        return text
    shown = []
    for char in text:
        if unicodedata.category(char) in _COMMANDS:
            char = char.encode("unicode_escape").decode()
        shown.append(char)
    return "".join(shown)


def one_line(error: BaseException) -> str:
    """An error's message on one line; the name of its type if the message is empty.

    >>> one_line(OSError("no\\nroom")), one_line(MemoryError())
    ('no room', 'MemoryError')
    """
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def answer_interrupts(message: str) -> Iterator[None]:
    """While the block runs, Ctrl-C prints `message` at once, whatever the main thread is doing.

    The block then gets its KeyboardInterrupt as ever. If the program has not ended after
    `GRACE_SECONDS`, or at a second Ctrl-C, it is ended without cleaning up: outputs are renamed
    into place when they are whole."""
    if threading.current_thread() is not threading.main_thread() or os.name == "nt":
        try:
            yield
        except KeyboardInterrupt:
            print(message, file=sys.stderr)
            raise
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The signal itself writes to it.
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    told = threading.Lock()

    def tell() -> None:
        """Once, from the watch or from here: on a busy machine the program may end before the watch
        has its turn."""
        if told.acquire(blocking=False):
            os.write(2, f"\n{message}\n".encode())

    threading.Thread(target=_watch, args=(reader, tell), name="fdbd-interrupt", daemon=True).start()
    is_interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        # The watch goes on until the process ends, which other threads may delay.
        is_interrupted = True
        tell()
        raise
    finally:
        if not is_interrupted:
            signal.set_wakeup_fd(before)
            # This ends the watch.
            os.close(writer)


def _watch(reader: int, tell: Callable[[], None]) -> None:
    first: float | None = None
    while number := os.read(reader, 1):
        if number[0] != signal.SIGINT:
            continue
        if first is None:
            first = time.monotonic()
            tell()
            late = threading.Timer(GRACE_SECONDS, os._exit, (INTERRUPTED,))
            late.daemon = True
            late.start()
        elif time.monotonic() - first > _ONE_PRESS_SECONDS:
            os._exit(INTERRUPTED)
    os.close(reader)
