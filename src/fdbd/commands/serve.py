"""fdbd serve: a guard over HTTP."""

from pathlib import Path

from fdbd.commands import options
from fdbd.commands.options import arg, opt


def serve(
    guard: Path = arg(..., "A guard's file, or an .onnx file of fdbd export."),
    host: str = opt("127.0.0.1", "The address to listen on; 0.0.0.0 for all."),
    port: int = opt(8000, "The port to listen on; 0: any free one."),
    token_file: Path | None = opt(
        None, "A file with the token that clients must send as Authorization: Bearer."
    ),
    workers: int = opt(1, "Processes, each with its own copy of the guard.", min=1),
    max_workers: int | None = opt(
        None, "With --engine ray: replicas under load; default: always --workers.", min=1
    ),
    engine: options.Engine = options.ENGINE,
    address: str | None = options.ADDRESS,
    name: str = opt("guard", "The model's name in the Open Inference Protocol."),
    batch_size: int = opt(32, "Rows that go through the model together at most.", min=1),
    delay: float = opt(
        1.0, "Milliseconds that a batch may wait for more requests; 0: none waits.", min=0
    ),
    queue: int = opt(1024, "Rows that may wait; more are answered with 503.", min=1),
    timeout: float = opt(30.0, "Seconds that a request may take.", min=0.001),
    max_body: int = opt(32, "Megabytes of a request's body.", min=1),
    state: Path | None = opt(
        None, "A folder for the monitor's state; default: GUARD.state beside the guard."
    ),
    no_state: bool = opt(False, "Keep no state across restarts.", "--no-state"),
    no_samples: bool = opt(False, "Keep no thumbnails of rejected images.", "--no-samples"),
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
    token.txt`
    """
    from fdbd.util.extras import require

    for module in ("starlette", "uvicorn", "multipart", "prometheus_client"):
        require(module, "serve")
    from fdbd.serve.app import Settings
    from fdbd.serve.run import Service, run

    if not guard.is_file():
        raise FileNotFoundError(f"no guard at {str(guard)!r}: no such file")
    settings = Settings(
        name=name,
        token=None if token_file is None else _token(token_file),
        batch_size=batch_size,
        delay=delay / 1000,
        queue=queue,
        timeout=timeout,
        max_body=max_body * 1_000_000,
        samples=0 if no_samples else Settings.samples,
    )
    service = Service(
        str(guard.resolve()),
        settings,
        state=None
        if no_state
        else str((state or guard.with_name(f"{guard.name}.state")).absolute()),
        workers=workers,
        max_workers=max_workers,
        delta=delta,
        window=window,
        webhook=webhook,
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


def _token(path: Path) -> str:
    """The token in a file, which must be one word of at least 16 characters."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"the token in {str(path)!r} cannot be read: {error}") from None
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise ValueError(f"the token in {str(path)!r} must be one word of at least 16 characters")
    return token
