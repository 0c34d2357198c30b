"""fdbd serve: a guard over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fdbd.commands import options


def serve(
    guard: Annotated[Path, typer.Argument(help="A guard's file, or an .onnx file of fdbd export.", show_default=False)],
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0: any free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token that clients must send as Authorization: Bearer.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with its own copy of the guard.")] = 1,
    max_workers: Annotated[
        int | None, typer.Option(min=1, help="With --engine ray: replicas under load; default: always --workers.")
    ] = None,
    engine: options.EngineName = options.Engine.local,
    address: options.Address = None,
    name: Annotated[str, typer.Option(help="The model's name in the Open Inference Protocol.")] = "guard",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that go through the model together at most.")] = 32,
    delay: Annotated[float, typer.Option(min=0, help="Milliseconds that a batch waits for company.")] = 1.0,
    queue: Annotated[int, typer.Option(min=1, help="Rows that may wait; more are answered with 503.")] = 1024,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 30.0,
    max_body: Annotated[int, typer.Option(min=1, help="Megabytes of a request's body.")] = 32,
    state: Annotated[
        Path | None, typer.Option(help="A folder for the monitor's state; default: GUARD.state beside the guard.")
    ] = None,
    no_state: Annotated[bool, typer.Option("--no-state", help="Keep no state across restarts.")] = False,
    no_samples: Annotated[bool, typer.Option("--no-samples", help="Keep no thumbnails of rejected images.")] = False,
    delta: Annotated[float, typer.Option(help="Probability of a false drift alarm per horizon.")] = 0.01,
    window: Annotated[int, typer.Option(min=1, help="Samples of the rolling OOD rate.")] = 1000,
    webhook: Annotated[str | None, typer.Option(help="An address that gets a POST when drift is found.")] = None,
    model: options.Model = None,
    checkpoint: options.Checkpoint = None,
    device: options.Device = "auto",
    trust_model: options.TrustModel = False,
) -> None:
    """Answer over HTTP: the Open Inference Protocol, POST /decide, Prometheus metrics and a page.

    Examples: `fdbd serve guard.safetensors`, `fdbd serve guard.onnx --port 9000 --token-file token.txt`
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
        state=None if no_state else str((state or guard.with_name(f"{guard.name}.state")).absolute()),
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
