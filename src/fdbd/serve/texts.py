"""Texts of a request to rows of a guard's input: bounded in length, encoded in the threads that
decode images, within the memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fdbd.core.tokenizer import TextEncoder
from fdbd.serve.asked import Asked, checked
from fdbd.serve.backend import Backend
from fdbd.serve.deadline import Deadline
from fdbd.serve.inference_protocol import is_unicode, parsed
from fdbd.serve.memory import MemoryBudget

if TYPE_CHECKING:
    from fdbd.serve.process import ServingProcess

BYTES_PER_CHARACTER = 400
"""What a tokenizer holds of a text while it works: for each token, of which a character may be one,
its spelling and places in the text, and copies of the text in which each byte knows its origin."""
LARGE_CHARACTERS = 20_000
"""Characters of a request from which on its texts are encoded in the thread for large inputs."""


def read_texts(body: bytes) -> tuple[list[str], bool]:
    """The texts of `{"text": "…"}` or `{"text": ["…", …]}`, and whether they came as a list."""
    request = parsed(body)
    given: Any = request.get("text") if isinstance(request, dict) else None
    is_list = isinstance(given, list)
    texts = given if is_list else [given]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError('the body is not {"text": "…"}, or {"text": ["…", …]} for several texts')
    return texts, is_list


def check_texts(texts: Sequence[str], most_characters: int) -> None:
    """ValueError for a text that is empty, too long or no valid text."""
    for number, text in enumerate(texts):
        if not text:
            raise ValueError(f"text {number} is empty")
        if len(text) > most_characters:
            raise ValueError(
                f"text {number} has {len(text):,} characters, more than the limit of "
                f"{most_characters:,} (--max-text)"
            )
        if not is_unicode(text):
            raise ValueError(f"text {number} is not valid Unicode")


def encode_texts(
    texts: Sequence[str], encoder: TextEncoder, deadline: Deadline, budget: MemoryBudget
) -> NDArray[np.int32]:
    """The texts as rows (N, …). TimeoutError once the deadline has passed."""
    rows = np.empty((len(texts), *encoder.row_shape), np.int32)
    for number, text in enumerate(texts):
        if deadline.remaining == 0:
            raise TimeoutError
        with budget.taken(BYTES_PER_CHARACTER * len(text)):
            rows[number] = encoder.row(text)
    return rows


async def rows_of_texts(
    texts: list[str], backend: Backend, asked: Asked, process: ServingProcess
) -> NDArray[np.int32]:
    """Texts as rows of a guard's input, encoded outside the event loop. The refusal of a text that
    is too long, or no text, is the answer."""
    checked(check_texts, texts, process.settings.max_text)
    encoder = backend.encoder
    assert encoder is not None
    # The rows, their copy in a batch, and what the model makes of its copy in 64 bits.
    asked.memory.take(4 * 4 * len(texts) * int(np.prod(encoder.row_shape)))
    run = process.decoder.run
    if sum(len(text) for text in texts) > LARGE_CHARACTERS:
        run = process.decoder.run_large
    rows: NDArray[np.int32] = await run(
        asked, encode_texts, texts, encoder, asked.deadline, process.budget
    )
    return rows
