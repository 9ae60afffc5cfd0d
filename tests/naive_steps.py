"""The rule of a decoding step in loops over single tokens: who stands where and who sees whom."""

from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from workers.decoding.step_groups import PlacedQuery
from workers.decoding.strategies.mars import RowQuery


@dataclass
class NaiveToken:
    """A query token; `seen` holds (place, position) of what it sees in its slot, itself included."""

    slot: int
    place: int
    token_id: int
    position: int
    seen: list[tuple[int, int]] = field(default_factory=list)


def naive_tokens(row: PlacedQuery, max_length: int) -> list[NaiveToken]:
    """The query tokens of a row in the order in which they stand."""
    query, lane, tokens = row.query, 0, []
    prefix = [(place, place) for place in range(row.start)]
    real: list[tuple[int, int]] = []
    for lane in range(query.num_real):
        real.append((row.start + lane, row.start + lane))
        tokens.append(
            NaiveToken(row.slot, row.start + lane, query.token_ids[lane], row.start + lane, prefix + real[: lane + 1])
        )
    num_certain = query.num_real - query.num_drafts
    lane = query.num_real
    for run in range(query.num_runs if query.run_length else 0):
        num_accepted = run if query.num_runs > 1 else query.num_drafts
        before, own = real[: num_certain + num_accepted], []
        for number in range(1, query.run_length + 1):
            # Behind the last accepted token, but never beyond the positions that the model has.
            position = min(row.start + num_certain + num_accepted - 1 + number, max_length - 1)
            own.append((row.start + lane, position))
            tokens.append(
                NaiveToken(row.slot, row.start + lane, query.token_ids[lane], position, prefix + before + own)
            )
            lane += 1
    assert lane == len(query.token_ids)
    return tokens


def sees(token: NaiveToken, window: int | None) -> set[int]:
    """The places that a layer with this window sees: the last `window` positions, its own among them."""
    return {place for place, position in token.seen if window is None or position > token.position - window}


def random_rows(random: Random, *, num_slots: int, max_length: int, vocab_size: int = 40) -> list[PlacedQuery]:
    """Rows in some of the slots: prompts of any length, drafts, runs of placeholders with and without branches."""
    slots = sorted(random.sample(range(num_slots), random.randint(1, num_slots)))
    rows = []
    for slot in slots:
        is_prompt = random.random() < 0.3
        num_certain = random.randint(1, 30 if is_prompt else 3)
        num_drafts = 0 if is_prompt else random.randint(0, 4)
        # Some runs are longer than the sliding windows of the tests.
        run_length = random.randint(0, 8)
        num_runs = num_drafts + 1 if random.random() < 0.5 and run_length else 1
        num_real = num_certain + num_drafts
        token_ids = [random.randrange(vocab_size) for _ in range(num_real + num_runs * run_length)]
        start = random.choice([0, random.randint(0, max_length - num_real)])
        rows.append(PlacedQuery(slot, start, RowQuery(token_ids, num_real, num_drafts, num_runs, run_length)))
    return rows


def naive_attention(
    query_HD: Tensor, keys_KTD: Tensor, values_KTD: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """One query token, head by head."""
    heads = []
    num_shared = len(query_HD) // len(keys_KTD)
    for head, query_D in enumerate(query_HD):
        scores_T = keys_KTD[head // num_shared] @ query_D * scaling
        if softcap is not None:
            scores_T = softcap * torch.tanh(scores_T / softcap)
        heads.append(scores_T.softmax(0) @ values_KTD[head // num_shared])
    return torch.stack(heads)
