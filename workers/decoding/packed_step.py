"""The query tokens of a step without padding, one row behind the other, and who sees whom.

All layers but attention work on the N query tokens as they stand. For attention they form groups of rows in neighbouring slots, so
that each group reads the cache as a view; a row that has far more query tokens than others is a group of its own.

One rule says who sees whom. A row's query token stands in a lane 0, 1, ... and is written to place `start + lane` of the row's
slot. It sees all places before `start`, the first `limit` lanes, and the lanes from `own` up to itself. For a real token that is
plain causal attention; a placeholder sees the real tokens up to its point of acceptance and the placeholders of its own run. A
layer with a sliding window goes by positions, which repeat between runs.

Shapes: N query tokens of a step, B rows, C numbers of a row, R slots of a group, Q lanes of a group, T places that are read, G
query heads per key head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.decoding.step_groups import PlacedQuery, group_rows, output_bases

Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class SlotShape:
    """What a step must know of the cache: positions of a row, and places of a slot, of which the last takes what is not kept.

    With multiples above 1 a step has one of few shapes: its tokens, and the places that it reads, are a multiple. That costs some
    padding, and suits a GPU, on which compiled forwards and CUDA graphs want shapes that come again.
    """

    max_length: int
    num_places: int
    token_multiple: int = 1
    place_multiple: int = 1

    def rounded_places(self, num_places: int) -> int:
        """The next multiple, within the slot."""
        return min(-(-num_places // self.place_multiple) * self.place_multiple, self.num_places)


@dataclass(eq=False)
class Group:
    """Rows in neighbouring slots. `index_RQ` names their tokens among the N; padding names any of them. `masks` says for each layer
    type what they see (R, 1, Q, T)."""

    slots: slice
    num_places: int
    index_RQ: Tensor
    masks: Mapping[str, Tensor]
    _folded: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def folded_mask(self, layer_type: str, num_heads: int) -> Tensor:
        """The mask (R, 1, G * Q, T) for queries whose G heads per key head stand one behind the other."""
        key = (layer_type, num_heads)
        if key not in self._folded:
            self._folded[key] = self.masks[layer_type].repeat(1, 1, num_heads, 1)
        return self._folded[key]


@dataclass(frozen=True, eq=False)
class PackedStep:
    """What the model needs of a step.

    Attributes:
        token_N, position_N: the query tokens.
        slot_N, place_N: where their keys and values go.
        groups: for attention.
        output_N: where each token's result stands among those of all groups, (R * Q) behind (R * Q).
        first_B: the place of each row's first token among the N.
        is_in_order: whether the results of all groups, without any padding, are those of the N.
    """

    token_N: Tensor
    position_N: Tensor
    slot_N: Tensor
    place_N: Tensor
    groups: list[Group]
    output_N: Tensor
    first_B: Tensor
    is_in_order: bool

    def first_of(self, places: Sequence[int]) -> Tensor:
        """`first_B` of some of the rows."""
        if len(places) == len(self.first_B):
            return self.first_B
        return self.first_B[torch.tensor(places, dtype=torch.int64).to(self.first_B.device, non_blocking=True)]


def pack_step(
    rows: Sequence[PlacedQuery], windows: Mapping[str, int | None], *, shape: SlotShape, device: torch.device
) -> PackedStep:
    """Lays the rows of a step, in the order of their slots, behind one another. One transfer to the device.

    Args:
        rows: in ascending order of slots.
        windows: the sliding window of each layer type, None for full attention.
        shape: of the slots; placeholders beyond the last position, which nobody reads, stand there.
        device: of the model.
    """
    members = group_rows(rows)
    lanes = _Lanes.of(rows, members, shape.max_length)
    seats = [_Seats.of(group, lanes, shape) for group in members]
    is_windowed = any(window is not None for window in windows.values())
    packed = (lanes.token_N, lanes.position_N, lanes.slot_N, lanes.place_N, lanes.output_N)
    num_padding = -len(lanes.token_N) % shape.token_multiple
    paddings = (0, 0, 0, shape.num_places - 1, 0)
    arrays = [
        np.pad(array, (0, num_padding), constant_values=value) for array, value in zip(packed, paddings, strict=True)
    ]
    arrays.append(lanes.first_B)
    for group in seats:
        arrays += [group.index_RQ, group.place_RQ, group.limit_RQ, group.own_RQ]
        arrays += [group.position_RQ, group.key_positions()] if is_windowed else []
    sent = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device, non_blocking=True)
    parts = iter(
        [part.view(array.shape) for part, array in zip(sent.split([a.size for a in arrays]), arrays, strict=True)]
    )
    token_N, position_N, slot_N, place_N, output_N, first_B = (next(parts) for _ in range(6))
    groups = []
    for group in seats:
        index_RQ, *rule = (next(parts) for _ in range(4))
        near = (next(parts), next(parts)) if is_windowed else None
        masks = _masks(group, rule, near, windows)
        groups.append(Group(group.slots, group.num_places, index_RQ, masks))
    is_in_order = sum(group.index_RQ.size for group in seats) == len(token_N) == len(lanes.token_N)
    return PackedStep(token_N, position_N, slot_N, place_N, groups, output_N, first_B, is_in_order)


@dataclass(frozen=True, eq=False)
class _Lanes:
    """The numbers of the visibility rule for each of the N tokens, on the host. `limit_N` and `own_N` are places of the slot."""

    token_N: Array
    position_N: Array
    slot_N: Array
    place_N: Array
    limit_N: Array
    own_N: Array
    output_N: Array
    first_B: Array

    @classmethod
    def of(cls, rows: Sequence[PlacedQuery], groups: Sequence[Sequence[PlacedQuery]], max_length: int) -> "_Lanes":
        num_lanes_B = np.array([row.num_lanes for row in rows])
        first_B = np.cumsum(num_lanes_B) - num_lanes_B
        table_BC = np.array(
            [
                [
                    row.slot,
                    row.start,
                    query.num_real,
                    query.num_drafts,
                    query.has_branches,
                    query.run_length or 1,
                    base,
                    first,
                ]
                for row, base, first in zip(rows, output_bases(rows, groups), first_B, strict=True)
                for query in [row.query]
            ],
            dtype=np.int64,
        )
        columns = np.repeat(table_BC, num_lanes_B, axis=0).T
        slot_N, start_N, num_real_N, num_drafts_N, has_branches_N, length_N, base_N, first_N = columns
        lane_N = np.arange(len(slot_N)) - first_N
        is_real_N = lane_N < num_real_N
        run_N = (lane_N - num_real_N) // length_N
        # Drafts before the point of acceptance that the run stands behind.
        num_accepted_N = np.where(has_branches_N, run_N, num_drafts_N)
        limit_N = np.where(is_real_N, lane_N + 1, num_real_N - num_drafts_N + num_accepted_N)
        own_N = np.where(is_real_N, lane_N, num_real_N + run_N * length_N)
        position_N = np.minimum(start_N + np.where(is_real_N, lane_N, limit_N + lane_N - own_N), max_length - 1)
        return cls(
            token_N=np.array([token for row in rows for token in row.query.token_ids], dtype=np.int64),
            position_N=position_N,
            slot_N=slot_N,
            place_N=start_N + lane_N,
            limit_N=start_N + limit_N,
            own_N=start_N + own_N,
            output_N=base_N + lane_N,
            first_B=first_B,
        )


@dataclass(frozen=True, eq=False)
class _Seats:
    """The same for the lanes of a group of rows. A lane without a token, and a slot without a row, see the first place: what comes
    out is not read."""

    slots: slice
    num_places: int
    has_branches: bool
    is_token_RQ: np.ndarray[Any, np.dtype[np.bool_]]
    index_RQ: Array
    place_RQ: Array
    limit_RQ: Array
    own_RQ: Array
    position_RQ: Array

    @classmethod
    def of(cls, rows: Sequence[PlacedQuery], lanes: _Lanes, shape: SlotShape) -> "_Seats":
        first_slot, num_slots = rows[0].slot, rows[-1].slot - rows[0].slot + 1
        count_R1 = np.zeros((num_slots, 1), dtype=np.int64)
        first_R1 = np.zeros((num_slots, 1), dtype=np.int64)
        seat_B = [row.slot - first_slot for row in rows]
        count_R1[seat_B, 0] = [row.num_lanes for row in rows]
        begin = int(np.searchsorted(lanes.slot_N, first_slot))
        first_R1[seat_B, 0] = begin + np.cumsum(count_R1[seat_B, 0]) - count_R1[seat_B, 0]
        lane_Q = np.arange(max(row.num_lanes for row in rows))
        is_token_RQ = lane_Q < count_R1
        index_RQ = np.where(is_token_RQ, first_R1 + lane_Q, 0)
        return cls(
            slots=slice(first_slot, first_slot + num_slots),
            num_places=shape.rounded_places(max(row.start + row.num_lanes for row in rows)),
            has_branches=any(row.query.has_branches for row in rows),
            is_token_RQ=is_token_RQ,
            index_RQ=index_RQ,
            place_RQ=np.where(is_token_RQ, lanes.place_N[index_RQ], 0),
            limit_RQ=np.where(is_token_RQ, lanes.limit_N[index_RQ], 1),
            own_RQ=np.where(is_token_RQ, lanes.own_N[index_RQ], 0),
            position_RQ=np.where(is_token_RQ, lanes.position_N[index_RQ], 0),
        )

    def key_positions(self) -> Array:
        """The position of the token in each place (R, T): the place itself, but for placeholders in branches."""
        key_RT = np.tile(np.arange(self.num_places), (len(self.index_RQ), 1))
        row_N, lane_N = np.nonzero(self.is_token_RQ)
        key_RT[row_N, self.place_RQ[row_N, lane_N]] = self.position_RQ[row_N, lane_N]
        return key_RT


def _masks(
    seats: _Seats, rule: Sequence[Tensor], near: tuple[Tensor, Tensor] | None, windows: Mapping[str, int | None]
) -> dict[str, Tensor]:
    """For each layer type what the lanes of a group see (R, 1, Q, T).

    Args:
        seats: the group.
        rule: the last place that a lane sees, its limit, and where its own run begins.
        near: positions of lanes (R, Q) and of places (R, T), for sliding windows.
        windows: of the layer types.
    """
    place_RQ1, limit_RQ1, own_RQ1 = (numbers_RQ[..., None] for numbers_RQ in rule)
    place_T = torch.arange(seats.num_places, device=place_RQ1.device)
    visible_RQT = place_T <= place_RQ1
    if seats.has_branches:  # else the own run begins where the limit ends
        visible_RQT = (place_T < limit_RQ1) | (visible_RQT & (place_T >= own_RQ1))
    masks = {}
    for layer_type, window in windows.items():
        seen_RQT = visible_RQT
        if window is not None and near is not None:
            position_RQ, key_RT = near
            seen_RQT = visible_RQT & (key_RT[:, None] > position_RQ[..., None] - window)
        masks[layer_type] = seen_RQT[:, None]
    return masks
