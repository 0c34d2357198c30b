"""Pseudo-OOD sounds: in-distribution recordings, changed until a classifier knows nothing in them,
for weighing detectors (``fdbd.Auto(kinds=audio_kinds)``)."""

from __future__ import annotations

import torch
from torch import Tensor

PIECES = 16
"""Pieces that a recording is cut into before they change places."""


def audio_kinds(waves: object, count: int = 50, seed: int = 0) -> dict[str, Tensor]:
    """Pseudo-OOD sounds of each kind, each as loud as the recording that it is made of:

    - "reversed bands": the lowest frequencies become the highest, and the other way round;
    - "noise": white noise;
    - "random phases": noise with the spectrum of the recording;
    - "shuffled pieces": sixteen pieces, which change places.

    Args:
        waves: recordings (N, T) or (N, channels, T), as the model takes them.
        count: how many of each kind; recordings are used again if there are fewer.
        seed: of everything that is drawn.

    >>> kinds = audio_kinds(torch.rand(4, 1000), count=2)
    >>> list(kinds)
    ['reversed bands', 'noise', 'random phases', 'shuffled pieces']
    >>> kinds["noise"].shape
    torch.Size([2, 1000])
    """
    if count < 1:
        raise ValueError(f"count is {count}, expected at least 1 sound of each kind")
    if not isinstance(waves, Tensor) or waves.ndim not in (2, 3) or not waves.is_floating_point():
        found = type(waves).__name__
        if isinstance(waves, Tensor):
            found = f"{waves.dtype} {tuple(waves.shape)}"
        raise ValueError(
            "pseudo-OOD sounds are made of floating-point recordings (N, T) or (N, channels, T), "
            f"not of {found}"
        )
    if len(waves) == 0 or waves.shape[-1] < 2 * PIECES:
        raise ValueError(
            f"recordings have shape {tuple(waves.shape)}, expected at least one, of at least "
            f"{2 * PIECES} samples"
        )
    waves = waves.detach().to("cpu", torch.float32)
    changes = {
        "reversed bands": _reverse_bands,
        "noise": _white_noise,
        "random phases": _scramble_phases,
        "shuffled pieces": _shuffle_pieces,
    }
    kinds = {}
    for number, (name, change) in enumerate(changes.items()):
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        rows = torch.arange(number * count, (number + 1) * count) % len(waves)
        chosen = waves[rows]
        kinds[name] = _as_loud_as(chosen, change(chosen, generator))
    return kinds


def _as_loud_as(waves: Tensor, changed: Tensor) -> Tensor:
    """The changed recordings with the loudness of the others."""
    loudness = waves.square().mean(dim=-1, keepdim=True).sqrt()
    own = changed.square().mean(dim=-1, keepdim=True).sqrt()
    return changed * loudness / own.clamp_min(1e-12)


def _reverse_bands(waves: Tensor, generator: torch.Generator) -> Tensor:
    spectrum = torch.fft.rfft(waves)
    # What does not change over time has no place among the frequencies.
    reversed_bands = torch.cat([spectrum[..., :1], spectrum[..., 1:].flip(-1)], dim=-1)
    mirrored: Tensor = torch.fft.irfft(reversed_bands, n=waves.shape[-1])
    return mirrored


def _white_noise(waves: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(waves.shape, generator=generator)


def _scramble_phases(waves: Tensor, generator: torch.Generator) -> Tensor:
    amplitude = torch.fft.rfft(waves).abs()
    # The phases of a real signal, so that the inverse transform is real, too.
    phases = torch.fft.rfft(torch.randn(waves.shape, generator=generator)).angle()
    scrambled: Tensor = torch.fft.irfft(amplitude * torch.exp(1j * phases), n=waves.shape[-1])
    return scrambled


def _shuffle_pieces(waves: Tensor, generator: torch.Generator) -> Tensor:
    shuffled = []
    for wave in waves:
        pieces = wave.tensor_split(PIECES, dim=-1)
        order = torch.randperm(PIECES, generator=generator).tolist()
        shuffled.append(torch.cat([pieces[place] for place in order], dim=-1))
    return torch.stack(shuffled)
