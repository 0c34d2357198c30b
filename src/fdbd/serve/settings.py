"""How the service behaves: every field but `examples` is an option of `fdbd serve`."""

from __future__ import annotations

from dataclasses import dataclass

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Settings:
    """Limits and behaviour of one process of the service."""

    token: str | None = None
    """Clients send it as ``Authorization: Bearer TOKEN``; None: no token is needed."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that a request's Host header may have, beside addresses of this machine's loopback.
    Empty: with a token every host is accepted, without a token only IP addresses and localhost."""
    batch_size: int = 32
    delay: float = 0.001
    """Seconds that a batch may wait for more requests."""
    queue: int = 1024
    """Rows that may wait."""
    timeout: float = 30.0
    """Seconds from the first byte of a request to the last byte of its answer."""
    header_timeout: float = 10.0
    """Seconds within which the headers of a request must be complete."""
    max_body: int = 32 * MEGABYTE
    """Bytes of a request's body."""
    max_header: int = 32_768
    """Bytes of a request's line and headers together."""
    max_headers: int = 100
    """Number of a request's headers."""
    max_pixels: int = 16_000_000
    """Pixels of an image, as it is decoded."""
    max_text: int = 65_536
    """Characters of a text. A model reads the first few hundred tokens of it."""
    connections: int = 512
    """Open connections of a process."""
    memory: int | None = None
    """Bytes that a process may use in all; None: see `fdbd.serve.memory.budget_of_process`."""
    decoders: int = 2
    """Images that are decoded at the same time."""
    samples: int = 24
    """Rejected images that are kept as thumbnails for the page; 0: none."""
    examples: bool = False
    """Whether the page offers the pictures of the package; `fdbd demo` does."""
