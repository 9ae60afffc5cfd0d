"""A packed step against the rule in plain Python: who stands where, who sees whom, and what attention makes of it."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_steps import naive_attention, naive_tokens, random_rows, sees
from random_requests import MODELS, few_examples
from scripted_model import ByteTokenizer
from tiny_models import MASK_ID
from torch import nn

from workers.config import RowDecodingSettings
from workers.decoding.decoder_model import DecoderModel
from workers.decoding.engine import DecodingEngine
from workers.decoding.packed_step import PackedStep, SlotShape, pack_step
from workers.decoding.request import Request
from workers.decoding.slot_attention import StepContext, _attend
from workers.decoding.step_groups import PlacedQuery
from workers.decoding.strategies.mars import RowQuery

CPU = torch.device("cpu")
WINDOWS = {"full_attention": None, "sliding_attention": 5}
MAX_LENGTH = 40
SHAPE = SlotShape(MAX_LENGTH, MAX_LENGTH + 65)


def seats_of(step: PackedStep) -> dict[int, tuple[int, int, int]]:
    """Group, slot and lane of each query token, found from where its result is taken."""
    flat = []
    for number, group in enumerate(step.groups):
        num_rows, num_lanes = group.index_RQ.shape
        assert num_rows == group.slots.stop - group.slots.start
        flat += [(number, group.slots.start + row, lane) for row in range(num_rows) for lane in range(num_lanes)]
    return {token: flat[place] for token, place in enumerate(step.output_N.tolist())}


@few_examples(150)
@given(seed=st.integers(0, 10**6), num_slots=st.integers(1, 12))
def test_every_token_sees_what_the_rule_says(seed, num_slots):
    rows = random_rows(Random(seed), num_slots=num_slots, max_length=MAX_LENGTH)
    step = pack_step(rows, WINDOWS, shape=SHAPE, device=CPU)
    expected = [token for row in rows for token in naive_tokens(row, MAX_LENGTH)]
    assert step.token_N.tolist() == [token.token_id for token in expected]
    assert step.position_N.tolist() == [token.position for token in expected]
    assert step.slot_N.tolist() == [token.slot for token in expected]
    assert step.place_N.tolist() == [token.place for token in expected]
    firsts = [sum(other.num_lanes for other in rows[:number]) for number in range(len(rows))]
    assert step.first_B.tolist() == firsts
    seats = seats_of(step)
    for number, token in enumerate(expected):
        group, slot, lane = seats[number]
        assert slot == token.slot
        row = slot - step.groups[group].slots.start
        assert step.groups[group].index_RQ[row, lane] == number
        for layer_type, window in WINDOWS.items():
            visible_T = step.groups[group].masks[layer_type][row, 0, lane]
            assert visible_T.nonzero().flatten().tolist() == sorted(sees(token, window))


@few_examples(100)
@given(seed=st.integers(0, 10**6), num_slots=st.integers(1, 20))
def test_groups_waste_little_and_padding_sees_something(seed, num_slots):
    rows = random_rows(Random(seed), num_slots=num_slots, max_length=MAX_LENGTH)
    step = pack_step(rows, WINDOWS, shape=SHAPE, device=CPU)
    lanes = {row.slot: row.num_lanes for row in rows}
    grouped = []
    for group in step.groups:
        slots = range(group.slots.start, group.slots.stop)
        members = [slot for slot in slots if slot in lanes]
        grouped += members
        assert (slots[0], slots[-1]) == (members[0], members[-1])
        assert 4 * (len(slots) - len(members)) <= len(slots)
        # A row with many lanes would give all others its padding.
        assert len(members) == 1 or max(lanes[slot] for slot in members) <= max(16, 2 * min(lanes.values()))
        assert all(mask.any(dim=-1).all() for mask in group.masks.values())
    assert sorted(grouped) == sorted(lanes)


@few_examples(60)
@given(
    seed=st.integers(0, 10**6),
    num_slots=st.integers(1, 6),
    num_key_heads=st.sampled_from([1, 2]),
    num_shared=st.sampled_from([1, 3]),
    softcap=st.sampled_from([None, 2.0]),
    layer_type=st.sampled_from(sorted(WINDOWS)),
)
def test_slot_attention_equals_naive_attention(seed, num_slots, num_key_heads, num_shared, softcap, layer_type):
    """Heads that share keys, a scaling of its own, softcaps, sliding windows; values narrower than keys."""
    rows = random_rows(Random(seed), num_slots=num_slots, max_length=MAX_LENGTH)
    step = pack_step(rows, WINDOWS, shape=SHAPE, device=CPU)
    heads = {"num_key_heads": num_key_heads, "num_shared": num_shared}
    check_attention(rows, step, softcap=softcap, layer_type=layer_type, seed=seed, **heads)


def check_attention(
    rows: list[PlacedQuery],
    step: PackedStep,
    *,
    num_key_heads: int,
    num_shared: int,
    softcap: float | None,
    layer_type: str,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens, num_heads = len(step.token_N), num_key_heads * num_shared
    # As a model gives them: heads and tokens change places without a copy.
    query_1HND = torch.randn(1, num_tokens, num_heads, 8, generator=generator).transpose(1, 2)
    keys_SKPD = torch.randn(rows[-1].slot + 1, num_key_heads, MAX_LENGTH + 50, 8, generator=generator)
    values_SKPD = torch.randn(rows[-1].slot + 1, num_key_heads, MAX_LENGTH + 50, 5, generator=generator)
    context = StepContext(step, WINDOWS, CPU)
    sign = context.signs[layer_type]
    options = {"scaling": 0.4, "softcap": softcap, "decoding_step": context}
    result, weights = _attend(nn.Identity(), query_1HND, keys_SKPD, values_SKPD, sign, **options)
    assert weights is None
    assert result.shape == (1, num_tokens, num_heads, 5)
    for number, token in enumerate(each for row in rows for each in naive_tokens(row, MAX_LENGTH)):
        places = sorted(sees(token, WINDOWS[layer_type]))
        keys, values = keys_SKPD[token.slot, :, places], values_SKPD[token.slot, :, places]
        naive_HD = naive_attention(query_1HND[0, :, number], keys, values, 0.4, softcap)
        torch.testing.assert_close(result[0, number], naive_HD, atol=1e-5, rtol=1e-5)


def test_a_padded_group_that_is_as_large_as_the_step_takes_its_own_tokens():
    """Slot 1 is empty, so there are two groups; the second has 2 rows of 4 lanes, as many as the step has tokens, but 2 of them
    are padding. It once took all tokens of the step as they stood."""
    rows = [PlacedQuery(slot, 3, RowQuery([5] * num_lanes, num_lanes)) for slot, num_lanes in ((0, 2), (2, 4), (3, 2))]
    step = pack_step(rows, {"full_attention": None}, shape=SHAPE, device=CPU)
    assert [tuple(group.index_RQ.shape) for group in step.groups] == [(1, 2), (2, 4)]
    check_attention(rows, step, num_key_heads=2, num_shared=2, softcap=None, layer_type="full_attention", seed=0)


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_logits_of_branches_are_those_of_the_plain_model(model_type):
    """Each run of placeholders behind its own drafts, and each draft, as if nothing else stood there; three rows, gaps between."""
    model = MODELS[model_type]
    decoder = DecoderModel(model, num_slots=5, max_length=MAX_LENGTH, num_spare=64)
    random = Random(3)
    prompts = {slot: [random.randrange(40) for _ in range(length)] for slot, length in ((0, 12), (2, 1), (4, 9))}
    with torch.inference_mode():
        first = [PlacedQuery(slot, 0, RowQuery(prompt, len(prompt))) for slot, prompt in prompts.items()]
        decoder.forward(decoder.pack(first))
        rows = []
        for (slot, prompt), num_drafts, num_runs in zip(prompts.items(), (3, 0, 2), (4, 1, 1), strict=True):
            real = [random.randrange(40) for _ in range(1 + num_drafts)]
            query = RowQuery(real + [40] * (2 * num_runs), len(real), num_drafts, num_runs, 2)
            rows.append(PlacedQuery(slot, len(prompt), query))
        logits_NV = decoder.logits(decoder.forward(decoder.pack(rows)))
    number = 0
    for row in rows:
        placed = naive_tokens(row, MAX_LENGTH)
        token_at = {token.place: token.token_id for token in placed} | dict(enumerate(prompts[row.slot]))
        for token in placed:
            # Positions are those of the tokens seen, one behind the other.
            ids = [token_at[place] for place, _ in token.seen]
            with torch.no_grad():
                expected_V = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits_NV[number], expected_V, atol=1e-4, rtol=0)
            number += 1
    assert number == len(logits_NV)


@few_examples(60)
@given(seed=st.integers(0, 10**6), num_slots=st.integers(1, 8))
def test_steps_of_rounded_shapes_are_the_same_with_padding_behind(seed, num_slots):
    rows = random_rows(Random(seed), num_slots=num_slots, max_length=MAX_LENGTH)
    exact = pack_step(rows, WINDOWS, shape=SHAPE, device=CPU)
    rounded = pack_step(rows, WINDOWS, shape=SlotShape(MAX_LENGTH, MAX_LENGTH + 65, 16, 32), device=CPU)
    num_tokens = len(exact.token_N)
    assert len(rounded.token_N) % 16 == 0 and len(rounded.token_N) - num_tokens < 16
    for name in ("token_N", "position_N", "slot_N", "place_N", "output_N"):
        assert torch.equal(getattr(rounded, name)[:num_tokens], getattr(exact, name))
    assert set(rounded.place_N[num_tokens:].tolist()) <= {MAX_LENGTH + 64}  # the trash
    for ours, theirs in zip(rounded.groups, exact.groups, strict=True):
        assert ours.num_places % 32 == 0 or ours.num_places == MAX_LENGTH + 65
        for name, mask in theirs.masks.items():
            assert torch.equal(ours.masks[name][..., : theirs.num_places], mask)
            assert not ours.masks[name][..., theirs.num_places :].any()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen2_sliding"])
def test_rounded_shapes_change_no_token(model_type):
    """As on a GPU, where the shapes of steps come again."""
    answers = []
    for multiples in ((1, 1), (16, 32)):
        engine = DecodingEngine(
            MODELS[model_type],
            ByteTokenizer(),
            mask_token_id=MASK_ID,
            end_ids={1},
            block_size=4,
            num_slots=3,
            max_length=50,
            prefill_chunk=7,
        )
        engine._model.slot_shape = replace(
            engine._model.slot_shape, token_multiple=multiples[0], place_multiple=multiples[1]
        )
        requests = [
            Request(
                place,
                tuple(range(2, 4 + 3 * place)),
                RowDecodingSettings(window=4, draft_branches=True, max_new_tokens=12),
            )
            for place in range(6)
        ]
        answers.append([result.token_ids for result in engine.generate_all(requests)])
    assert answers[0] == answers[1]
