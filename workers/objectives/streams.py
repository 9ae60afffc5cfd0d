"""Samples, the clean and the noisy stream of a document, and packing into rows `[clean documents | noisy documents]`.

Shapes: B rows, L positions of a row, N predictions (supervised positions), C clean and M noisy tokens of one document,
R responses of one sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PADDING = -1


@dataclass(frozen=True)
class Sample:
    """One training sequence and the half-open token spans of its responses.

    `file` is the position in the sorted listing and `row` the row number in that file: together with `epoch` they
    name the sample, whichever rank trains on it and whenever. `epoch` counts the earlier uses of the row: with weights a row
    may be used several times in one epoch of the run, or in few of them.
    """

    file: int
    row: int
    epoch: int
    token_ids: NDArray[np.int32]
    responses: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Document:
    """The two streams of one sample before packing: what an objective makes of it.

    Positions count from 0 inside the document. A limit is the last clean position that a token may attend to (-1:
    none). `source_N` are the tokens whose hidden states predict, as indices into `[clean | noisy]` of this document.
    """

    clean_ids_C: NDArray[np.int64]
    clean_limit_C: NDArray[np.int64]
    noisy_ids_M: NDArray[np.int64]
    noisy_position_M: NDArray[np.int64]
    noisy_block_M: NDArray[np.int64]  # >= 1
    noisy_limit_M: NDArray[np.int64]
    source_N: NDArray[np.int64]
    label_N: NDArray[np.int64]
    in_ar_loss_N: NDArray[np.bool_]
    in_mask_loss_N: NDArray[np.bool_]
    num_response_tokens: int

    def __len__(self) -> int:
        return len(self.clean_ids_C) + len(self.noisy_ids_M)


class Places(NamedTuple):
    """Where tokens stand, which is all that attention depends on: four integer tensors of one shape."""

    document: Tensor
    block: Tensor
    position: Tensor
    clean_limit: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch of packed rows.

    `document_BL` numbers the documents of a row from 0; padding has -1. `block_BL` is 0 for clean tokens, the number
    of the noisy block inside its document (from 1) for placeholders, and a negative number of its own for each padding
    token, so that it sees itself only. `clean_limit_BL` is the last clean position of its document that a token may
    see. `source_N` indexes the flattened B*L hidden states. `num_response_tokens` counts the tokens that a loss is
    divided by, `num_tokens` and `num_padding` the positions of both streams.
    """

    token_ids_BL: Tensor
    position_ids_BL: Tensor
    document_BL: Tensor
    block_BL: Tensor
    clean_limit_BL: Tensor
    source_N: Tensor
    label_N: Tensor
    in_ar_loss_N: Tensor
    in_mask_loss_N: Tensor
    num_response_tokens: int
    num_tokens: int
    num_padding: int

    def places(self) -> Places:
        """What the attention mask is made from, (B, L) each."""
        return Places(self.document_BL, self.block_BL, self.position_ids_BL, self.clean_limit_BL)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """The same batch with its tensors on `device`."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value.to(device, non_blocking=non_blocking)
        return PackedBatch(**values)


class _Row(NamedTuple):
    token_ids_L: NDArray[np.int64]
    position_L: NDArray[np.int64]
    document_L: NDArray[np.int64]
    block_L: NDArray[np.int64]
    clean_limit_L: NDArray[np.int64]
    source_N: NDArray[np.int64]
    label_N: NDArray[np.int64]
    in_ar_loss_N: NDArray[np.bool_]
    in_mask_loss_N: NDArray[np.bool_]
    num_response_tokens: int


def response_phases(seed: int, sample: Sample, block_size: int) -> NDArray[np.int64]:
    """The random offset in [0, block_size) by which the block cuts of each response are shifted, (R,).

    A hash (splitmix64 chained over the fields) of seed, epoch, file, row and the index of the response: never of rank
    or order of arrival.
    """
    # The seed is mixed before the epoch is added: otherwise (seed 5, epoch 1) would be (seed 6, epoch 0).
    state_R = _splitmix64(np.full(len(sample.responses), seed % 2**64, dtype=np.uint64))
    response_R = np.arange(len(sample.responses), dtype=np.uint64)
    for part in (sample.epoch, sample.file, sample.row, response_R):
        state_R = _splitmix64(state_R + np.asarray(part).astype(np.uint64))
    return (state_R % np.uint64(block_size)).astype(np.int64)


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One output of splitmix64 for each state (Steele, Lea, Flood 2014)."""
    mixed = state + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result


def block_starts(start: int, end: int, block_size: int, offset: int) -> NDArray[np.int64]:
    """For each token of the response [start, end): the position at which its block begins, (end - start,).

    With `offset` o > 0 the first block has min(o, L) tokens; all others have `block_size`, but for the last, which
    ends with the response.
    """
    position = np.arange(start, end)
    begin = start + offset + (position - start - offset) // block_size * block_size
    return np.maximum(begin, start)


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices: each length goes, longest first, into the first bin with room; one above `capacity` alone.

    Bins come out with the longest first items first, so that neighbours have similar sizes.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if fitting is None:
            bins.append([index])
            room.append(capacity - lengths[index])
        else:
            bins[fitting].append(index)
            room[fitting] -= lengths[index]
    return bins


def pack_documents(documents: Sequence[Document], *, row_tokens: int, micro_batch_rows: int) -> list[PackedBatch]:
    """Rows of at most `row_tokens` positions (a longer document gets its own row), cut into micro-batches."""
    bins = first_fit_decreasing([len(document) for document in documents], row_tokens)
    rows = [_join_row([documents[index] for index in members]) for members in bins]
    rows.sort(key=lambda row: -len(row.token_ids_L))  # like with like: less padding
    return [_stack_rows(rows[i : i + micro_batch_rows]) for i in range(0, len(rows), micro_batch_rows)]


def padding_batch() -> PackedBatch:
    """A batch of one padding token that predicts nothing, for a rank that has run out of samples."""
    none = np.zeros(0, dtype=np.int64)
    no_flag = np.zeros(0, dtype=np.bool_)
    row = _Row(none, none, none, none, none, none, none, no_flag, no_flag, 0)
    return _stack_rows([row], min_length=1)


def _join_row(documents: Sequence[Document]) -> _Row:
    """Put all clean streams of a row first, then all noisy streams, and move indices along."""
    clean_lengths = [len(document.clean_ids_C) for document in documents]
    noisy_lengths = [len(document.noisy_ids_M) for document in documents]
    clean_offsets = np.cumsum([0, *clean_lengths])
    noisy_offsets = clean_offsets[-1] + np.cumsum([0, *noisy_lengths])

    numbers = np.arange(len(documents))
    sources = [
        np.where(
            document.source_N < clean_lengths[d],
            document.source_N + clean_offsets[d],
            document.source_N - clean_lengths[d] + noisy_offsets[d],
        )
        for d, document in enumerate(documents)
    ]
    clean_positions = [np.arange(length) for length in clean_lengths]
    return _Row(
        token_ids_L=np.concatenate([*(d.clean_ids_C for d in documents), *(d.noisy_ids_M for d in documents)]),
        position_L=np.concatenate([*clean_positions, *(d.noisy_position_M for d in documents)]),
        document_L=np.concatenate([np.repeat(numbers, clean_lengths), np.repeat(numbers, noisy_lengths)]),
        block_L=np.concatenate([np.zeros(clean_offsets[-1], dtype=np.int64), *(d.noisy_block_M for d in documents)]),
        clean_limit_L=np.concatenate([*(d.clean_limit_C for d in documents), *(d.noisy_limit_M for d in documents)]),
        source_N=np.concatenate(sources),
        label_N=np.concatenate([d.label_N for d in documents]),
        in_ar_loss_N=np.concatenate([d.in_ar_loss_N for d in documents]),
        in_mask_loss_N=np.concatenate([d.in_mask_loss_N for d in documents]),
        num_response_tokens=sum(document.num_response_tokens for document in documents),
    )


def _stack_rows(rows: Sequence[_Row], min_length: int = 0) -> PackedBatch:
    """Pad rows on the right to the longest and make tensors of them."""
    lengths = [len(row.token_ids_L) for row in rows]
    length = max(*lengths, min_length)

    def stack(vectors: Sequence[NDArray[np.int64]], filling: NDArray[np.int64]) -> Tensor:
        padded = [np.concatenate([vector, filling[len(vector) :]]) for vector in vectors]
        return torch.from_numpy(np.stack(padded))

    zeros = np.zeros(length, dtype=np.int64)
    minus_one = zeros + PADDING
    sources = [row.source_N + index * length for index, row in enumerate(rows)]
    return PackedBatch(
        token_ids_BL=stack([row.token_ids_L for row in rows], zeros),
        position_ids_BL=stack([row.position_L for row in rows], zeros),
        document_BL=stack([row.document_L for row in rows], minus_one),
        block_BL=stack([row.block_L for row in rows], PADDING - np.arange(length)),
        clean_limit_BL=stack([row.clean_limit_L for row in rows], minus_one),
        source_N=torch.from_numpy(np.concatenate(sources)),
        label_N=torch.from_numpy(np.concatenate([row.label_N for row in rows])),
        in_ar_loss_N=torch.from_numpy(np.concatenate([row.in_ar_loss_N for row in rows])),
        in_mask_loss_N=torch.from_numpy(np.concatenate([row.in_mask_loss_N for row in rows])),
        num_response_tokens=sum(row.num_response_tokens for row in rows),
        num_tokens=sum(lengths),
        num_padding=len(rows) * length - sum(lengths),
    )
