"""fdbd serve: a guard over HTTP."""

from pathlib import Path

from fdbd.commands import options
from fdbd.commands.options import arg, opt

MEGABYTE = 1_000_000


def serve(
    guard: list[str] = arg(
        ...,
        "A guard's file, or an .onnx file of fdbd export; give several as NAME=FILE.",
    ),
    host: str = opt("127.0.0.1", "The address to listen on; 0.0.0.0 for all."),
    port: int = opt(8000, "The port to listen on; 0: any free one."),
    metrics_port: int | None = opt(
        None, "A second port for /metrics and health alone, without a token."
    ),
    token_file: Path | None = opt(
        None, "A file with the token that clients must send as Authorization: Bearer."
    ),
    allowed_host: list[str] = opt(
        [], "A name that clients may ask for in the Host header; '*': any. Repeat it for several."
    ),
    workers: int = opt(1, "Processes, each with its own copy of the guard.", min=1),
    max_workers: int | None = opt(
        None, "With --engine ray: replicas under load; default: always --workers.", min=1
    ),
    engine: options.Engine = options.ENGINE,
    address: str | None = options.ADDRESS,
    name: str = opt("guard", "The guard's name in the Open Inference Protocol."),
    shadow: Path | None = opt(
        None,
        "A second guard that decides on the same inputs; its decisions are only recorded and "
        "counted.",
    ),
    batch_size: int = opt(32, "Largest number of rows per batch.", min=1),
    delay: float = opt(
        1.0, "Milliseconds that a batch may wait for more requests; 0: none waits.", min=0
    ),
    queue: int = opt(1024, "Most rows that may wait; further ones are answered with 503.", min=1),
    timeout: float = opt(
        30.0, "Seconds that a request may take, from its first byte to its answer.", min=0.001
    ),
    header_timeout: float = opt(
        10.0, "Seconds within which the headers of a request must arrive.", min=0.1
    ),
    connections: int = opt(512, "Most open connections per process.", min=8),
    memory: int | None = opt(
        None,
        "Megabytes that a process may use in all, the guard included; default: 2147 (2 GiB), or "
        "more if the guard needs it.",
        min=1,
    ),
    max_body: int = opt(32, "Largest body of a request, in megabytes.", min=1),
    max_pixels: float = opt(
        16.0,
        "Largest image, in megapixels. A larger JPEG is decoded at a fraction of its size.",
        min=0.001,
    ),
    max_text: int = opt(
        65_536,
        "Longest text, in characters; a model reads its first few hundred words.",
        min=1,
    ),
    state: Path | None = opt(
        None, "A folder for the monitor's state; default: GUARD.state beside the guard."
    ),
    no_state: bool = opt(False, "Keep no state across restarts.", "--no-state"),
    no_samples: bool = opt(False, "Keep no thumbnails of rejected images.", "--no-samples"),
    decisions: Path | None = opt(
        None, "A folder in which each decision is recorded, as one JSON object per line."
    ),
    decisions_max: int = opt(
        1000, "Most megabytes of records per process; the oldest are deleted.", min=1
    ),
    decisions_thumbnails: bool = opt(
        False,
        "Keep a small copy of each rejected image in its record.",
        "--decisions-thumbnails",
    ),
    delta: float = opt(0.01, "Probability of a false drift alarm per horizon."),
    window: int = opt(1000, "Number of latest samples in the rolling OOD rate.", min=1),
    webhook: str | None = opt(None, "An address that gets a POST when drift is found."),
    model: str | None = options.MODEL,
    checkpoint: Path | None = options.CHECKPOINT,
    device: str = options.DEVICE,
    trust_model: bool = options.TRUST_MODEL,
) -> None:
    """Answer over HTTP: the Open Inference Protocol, POST /decide, Prometheus metrics and a page.

    Examples: `fdbd serve guard.safetensors`, `fdbd serve guard.onnx --port 9000 --token-file
    token.txt`, `fdbd serve cats=cats.onnx dogs=dogs.onnx`
    """
    from fdbd.util.extras import require

    for module in ("starlette", "uvicorn", "httptools", "python_multipart", "prometheus_client"):
        require(module, "serve")
    from fdbd.serve.run import Service, run
    from fdbd.serve.settings import Settings

    guards = _files_by_name(guard, name)
    settings = Settings(
        token=None if token_file is None else _token(token_file),
        allowed_hosts=tuple(host.lower() for host in allowed_host),
        batch_size=batch_size,
        delay=delay / 1000,
        queue=queue,
        timeout=timeout,
        header_timeout=min(header_timeout, timeout),
        connections=connections,
        memory=None if memory is None else memory * MEGABYTE,
        max_body=max_body * MEGABYTE,
        max_pixels=round(max_pixels * 1_000_000),
        max_text=max_text,
        samples=0 if no_samples else Settings.samples,
    )
    first = Path(next(iter(guards.values())))
    state_folder = None
    if not no_state:
        state_folder = str((state or first.with_name(f"{first.name}.state")).absolute())
    if shadow is not None:
        _check_file(shadow)
    service = Service(
        guards,
        settings,
        state=state_folder,
        workers=workers,
        max_workers=max_workers,
        delta=delta,
        window=window,
        webhook=webhook,
        shadow=None if shadow is None else str(shadow.resolve()),
        decisions=None if decisions is None else str(decisions.absolute()),
        decisions_bytes=decisions_max * MEGABYTE,
        decisions_thumbnails=decisions_thumbnails,
        metrics_port=metrics_port,
        model=model,
        checkpoint=None if checkpoint is None else str(checkpoint.absolute()),
        device=device,
        trust=trust_model,
    )
    if engine is options.Engine.ray:
        from fdbd.serve.ray_engine import run_on_ray

        run_on_ray(service, host, port, address)
    else:
        run(service, host, port)


def _files_by_name(given: list[str], name: str) -> dict[str, str]:
    """The guards' files by their names in the service."""
    guards: dict[str, str] = {}
    for text in given:
        own_name, separator, path = text.partition("=")
        is_named = bool(separator) and not Path(text).exists()
        if not is_named:
            if len(given) > 1:
                raise ValueError(f"of several guards each needs a name: give NAME={text}")
            own_name = name
            path = text
        if own_name in guards:
            raise ValueError(f"two guards are called {own_name!r}; give each its own name")
        if not own_name or not all(c.isalnum() or c in "-_." for c in own_name):
            raise ValueError(
                f"{own_name!r} cannot be a guard's name: use letters, digits, '-', '_' and '.'"
            )
        _check_file(Path(path))
        guards[own_name] = str(Path(path).resolve())
    return guards


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"no guard at {str(path)!r}: no such file")


def _token(path: Path) -> str:
    """The token in a file, which must be one word of at least 16 characters."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"the token in {str(path)!r} cannot be read: {error}") from None
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise ValueError(f"the token in {str(path)!r} must be one word of at least 16 characters")
    return token
