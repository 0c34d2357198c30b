"""What a kernel is handed: the address of a block of 64-bit slots, integers and addresses of arrays."""

NEXT, CHUNK, ROWS, WIDTH, CLASSES, FROM_LOGITS, DIVIDE, UNTRUSTED, OUT_OF_RANGE = range(9)
"""Integers: chunks taken so far, rows a chunk, N, P, C, whether classes are to be found from logits, whether to divide
by the norm; and two findings of the kernel: a row came out as NaN, a class was none of the head's."""

FEATURES, GIVEN, NORMALS, OFFSETS, CENTER, FLOOR, OUT = range(9, 16)
"""Addresses: features (N, P); classes (N,) int64, or logits (N, C); normals (C, P), offsets (C,), center (P,) and floor
of the folded head; what is written: scores (N,), or float64 sums (chunks, P). Where softmax is summed, FEATURES are
logits (N, C), FLOOR is what multiplies them, DIVIDE asks for more than the largest, and (3, N) is written. Where rows
are placed, GIVEN (N,) are their places, OFFSETS (N,) their divisors, and CLASSES is the M of (M, P) that is written."""

LAYOUT = tuple(number for name, number in sorted(globals().items()) if name.isupper())
"""The numbers of all slots, by name. Kernels have this tuple in their closure: numba keeps machine code on disk until
the kernel's file or closure changes, and code of another layout would read the wrong memory."""

SLOTS = len(LAYOUT)
