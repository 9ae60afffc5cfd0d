"""What the benchmarks compare is the same work, and what they print is what they promise; no test here times anything."""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import MASK_ID, VOCAB_SIZE, random_samples, tiny_model

from benchmarks import held_out, lengths, positions, published_layout, training, training_quality
from benchmarks.data_wait import DataWait, write_parts
from benchmarks.held_out import HeldOutLosses
from benchmarks.memory import peak_memory_mb, reset_peak_memory
from benchmarks.quality_runs import AR, VARIANTS, Outcome, Variant
from pipelines.quickstart_task import validate_answer, write_quickstart_data
from pipelines.sample_stream import StreamPlan, rank_steps
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", ["llama_tied", "qwen2"])
@pytest.mark.parametrize("block_size", [1, 2, 4, 7, 16])
def test_published_layout_has_our_losses_and_gradients(model_type: str, block_size: int) -> None:
    """A baseline that computes something else than the method would be no baseline."""
    model = tiny_model(model_type)
    samples = random_samples(7, seed=block_size, num_turns=1)
    objective = MarsObjective(block_size, 1.0, 1.0, False, MASK_ID, seed=0)
    module = LossModule(model, objective)
    batches = objective.pack(samples, row_tokens=60, micro_batch_rows=2)
    ours = [module(batch, module.num_chunks_of(batch)) for batch in batches]
    our_gradients = gradients(model, torch.stack([sums.loss for sums in ours]).sum())

    groups = published_layout.sorted_batches(samples, 3)
    theirs = [published_layout.loss_sums(model, published_layout.collate(g, block_size), MASK_ID) for g in groups]
    their_gradients = gradients(model, torch.stack([sums.ar_sum + sums.mask_sum for sums in theirs]).sum())
    for name in ("ar_sum", "mask_sum"):
        mine = torch.stack([getattr(sums, name) for sums in ours]).sum()
        other = torch.stack([getattr(sums, name) for sums in theirs]).sum().detach()
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=0)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(gradient, their_gradients[name], atol=1e-5 * scale, rtol=1e-4)


def test_published_layout_is_the_whole_sequence_twice() -> None:
    """Prompt of 2, response of 5, blocks of 3; the noisy copy holds the prompt and one placeholder per response token."""
    samples = random_samples(9, seed=1, num_turns=1)
    groups = published_layout.sorted_batches(samples, 4)
    assert [len(group) for group in groups] == [4, 4, 1]
    assert sorted(s.row for group in groups for s in group) == list(range(9))
    lengths_in_order = [len(s.token_ids) for group in groups for s in group]
    assert lengths_in_order == sorted(lengths_in_order, reverse=True)
    model = tiny_model("llama")
    seen: list[torch.Tensor] = []
    shapes: list[tuple[int, ...]] = []
    model.base_model.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    model.get_output_embeddings().register_forward_hook(lambda _m, _i, logits: shapes.append(tuple(logits.shape)))
    published_layout.loss_sums(model, published_layout.collate(groups[0], 3), MASK_ID)
    length = len(groups[0][0].token_ids)
    assert shapes == [(4, 2 * length, VOCAB_SIZE)]
    for row, sample in enumerate(groups[0]):
        ((start, end),) = sample.responses
        clean, noisy = seen[0][row, : len(sample.token_ids)], seen[0][row, length : length + len(sample.token_ids)]
        assert clean.tolist() == sample.token_ids.tolist()
        assert noisy[:start].tolist() == sample.token_ids[:start].tolist()
        assert noisy[start:end].tolist() == [MASK_ID] * (end - start)


def test_published_mask_by_hand() -> None:
    """Blocks -1 -1 0 0 1 of `[clean | noisy]`."""
    mask = published_layout.attention_mask(torch.tensor([[-1, -1, 0, 0, 1]]))[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 1, 1, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 1],
    ]


def test_random_lengths_follow_the_table() -> None:
    samples = lengths.random_samples(20_000, seed=0, vocab_size=100)
    prompts = [sample.responses[0][0] for sample in samples]
    responses = [sample.responses[0][1] - sample.responses[0][0] for sample in samples]
    for values, quantiles in ((prompts, lengths.PROMPT_QUANTILES), (responses, lengths.RESPONSE_QUANTILES)):
        assert list(quantiles) == sorted(quantiles)
        assert len(quantiles) == len(lengths.LEVELS)
        drawn = np.quantile(values, lengths.LEVELS[1:-1])
        np.testing.assert_allclose(drawn[:-1], quantiles[1:-2], rtol=0.03)  # above the last but one, few are drawn
        assert quantiles[0] <= min(values)
        assert max(values) <= quantiles[-1]
    assert max(int(sample.token_ids.max()) for sample in samples[:100]) == 98  # 99 is the placeholder
    for sample in lengths.random_samples(50, seed=1, vocab_size=100, long_prompts=True):
        ((start, end),) = sample.responses
        assert start == 4 * (end - start)
        assert end == len(sample.token_ids)


def test_every_method_trains_on_every_sample_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three methods see the same samples in every repeat, and none goes first every time."""
    monkeypatch.setattr(training, "VOCAB_SIZE", VOCAB_SIZE)
    seen: list[tuple[str, list[list[int]]]] = []

    def method(name: str) -> training.Method:
        def step(samples):
            seen.append((name, [sample.token_ids.tolist() for sample in samples]))
            return training.StepResult({"a": 4.0, "b": 2.0, "c": 1.0}[name], 5.0, 0.0, 0.0, 10, 2)

        return step

    comparison = training.Comparison({name: method(name) for name in "abc"}, 3, long_prompts=False)
    comparison.run(3)
    measured = seen[3:]
    assert len(measured) == 9
    for repeat in range(3):
        of_repeat = measured[3 * repeat : 3 * repeat + 3]
        assert sorted(name for name, _ in of_repeat) == ["a", "b", "c"]
        assert of_repeat[0][1] == of_repeat[1][1] == of_repeat[2][1]
    assert {measured[0][0], measured[3][0], measured[6][0]} == {"a", "b", "c"}
    assert comparison.ratios("a", "b") == [2.0, 2.0, 2.0]
    assert comparison.padding_share("a") == 0.2


def test_methods_of_the_speed_benchmark_report_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MASK_TOKEN_ID", MASK_ID)
    samples = random_samples(6, seed=2, num_turns=1)
    results = []
    for build in (
        lambda model, optimizer: training.packed_method(
            model, optimizer, MarsObjective(training.BLOCK_SIZE, 1.0, 1.0, False, MASK_ID, seed=0)
        ),
        training.published_method,
    ):
        model = tiny_model("llama_tied")
        step = build(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        results.append([step(samples) for _ in range(3)])
    for ours, theirs in zip(*results, strict=True):  # of the second and third step too: the updates are the same
        assert ours.ar_loss == pytest.approx(theirs.ar_loss, rel=1e-4)
        assert ours.mask_loss == pytest.approx(theirs.mask_loss, rel=1e-4)
    assert results[0][2].ar_loss < results[0][0].ar_loss


def test_last_line_of_the_speed_benchmark_has_the_promised_fields() -> None:
    def result(seconds: float) -> training.StepResult:
        return training.StepResult(seconds, 9.0, 1.0, 1.0, 100, 5)

    def comparison(seconds: dict[str, list[float]]) -> training.Comparison:
        made = training.Comparison({}, 8, long_prompts=False)
        made.results = {name: [result(value) for value in values] for name, values in seconds.items()}
        made.num_response_tokens = [100, 100, 100]
        made.peak_mb = dict.fromkeys(seconds, 12.4)
        return made

    usual = comparison(
        {training.PUBLISHED: [6.0, 8.0, 3.0], training.MARS: [3.0, 4.0, 3.0], training.SFT: [2.0, 2.0, 2.0]}
    )
    long = comparison({training.PUBLISHED: [6.0, 9.0, 8.0], training.MARS: [2.0, 3.0, 4.0]})
    text, values = training.report(usual, long, DataWait(0.001, 4, 2.0, 500.0))
    assert json.loads(json.dumps(values)) == {
        "speedup_vs_published_layout": 2.0,
        "speedup_long_prompts": 3.0,
        "cost_vs_sft_step": 1.5,
        "data_wait_share": 0.001,
        "padding_share": 0.05,
        "peak_memory_mb": {training.PUBLISHED: 12, training.MARS: 12, training.SFT: 12},
    }
    assert "(1.000..2.000)" in text  # the spread stands beside the median


def test_positions_are_those_of_the_batches() -> None:
    """Against the batches themselves, for the first draw alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positions, "NUM_DRAWS", 1)
        samples = lengths.random_samples(32, 0, vocab_size=1000)
        published = positions.count_published(long_prompts=False, micro_batch_rows=4)
        groups = published_layout.sorted_batches(samples, 4)
        assert published.positions == sum(2 * published_layout.collate(g, 8).token_ids_SL.numel() for g in groups) / 32
        assert published.padding == pytest.approx(published.positions - 2 * sum(len(s.token_ids) for s in samples) / 32)
        responses = sum(end - start for sample in samples for start, end in sample.responses) / 32
        sft = positions.count_packed(1, 512, 2, long_prompts=False)
        mars = positions.count_packed(8, 512, 2, long_prompts=False)
        assert sft.head == responses
        placeholders = mars.head - responses
        assert 0.8 * responses < placeholders < 7 / 8 * responses
        assert mars.positions - mars.padding == pytest.approx(sft.positions - sft.padding + placeholders)


def test_peak_memory_counts_from_the_mark() -> None:
    block = np.ones(64 << 20, dtype=np.uint8)
    del block
    reset_peak_memory()
    before = peak_memory_mb()
    block = np.ones(128 << 20, dtype=np.uint8)
    after = peak_memory_mb()
    assert 120 < after - before < 200
    del block
    assert peak_memory_mb() == pytest.approx(after, abs=8)


@pytest.mark.timeout(120)
def test_the_stream_of_the_data_benchmark_is_the_real_one(ray_session: None, tmp_path: Path) -> None:
    index = write_parts(tmp_path, 2, VOCAB_SIZE)
    plan = StreamPlan(index, 0, 100, shuffle_window=512, num_epochs=1, max_steps=None)
    names = [(sample.file, sample.row) for samples in rank_steps(plan, 0, 1, 0) for sample in samples]
    assert sorted(names) == [(file, row) for file in range(2) for row in range(512)]
    assert sum(part.num_response_tokens for part in index.parts) < sum(part.num_tokens for part in index.parts)


def test_held_out_losses_are_those_of_the_training_code() -> None:
    model = tiny_model("llama")
    samples = random_samples(5, seed=8)
    objective = MarsObjective(4, 1.0, 1.0, True, MASK_ID, seed=0)
    module = LossModule(model, objective)
    batches = objective.pack(samples, row_tokens=90, micro_batch_rows=2)
    sums = [module(batch, module.num_chunks_of(batch)) for batch in batches]
    count = sum(batch.num_response_tokens for batch in batches)
    expected_ar = float(sum(each.ar_sum for each in sums)) / count
    expected_mask = float(sum(each.mask_sum for each in sums)) / count
    assert held_out.plain_one_token_loss(model, samples) == pytest.approx(expected_ar, rel=1e-5)
    only_mask = MarsObjective(4, 0.0, 1.0, True, MASK_ID, seed=0)
    assert held_out.mask_loss(model, samples, only_mask) == pytest.approx(expected_mask, rel=1e-5)


def test_held_out_answers_of_the_quickstart_are_valid(tmp_path: Path) -> None:
    write_quickstart_data(tmp_path, 3, num_train_rows=8, num_heldout_rows=40, num_train_shards=1)
    pairs = held_out.quickstart_pairs(tmp_path / "heldout", seed=3)
    assert len(pairs) == 40
    assert all(validate_answer(prompt, answer).is_valid for prompt, answer in pairs)
    assert pairs == held_out.quickstart_pairs(tmp_path / "heldout", seed=3)
    samples = random_samples(40, seed=1, num_turns=1)
    num_tokens = sum(end - start for sample in samples for start, end in sample.responses)
    # 16 of 40 prompts ask for one of five equally frequent phrases.
    assert held_out.quickstart_floor(pairs, samples) == pytest.approx(16 * np.log(5) / num_tokens)


def test_variants_differ_from_the_default_in_one_setting_or_in_block_size() -> None:
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(VARIANTS) == 8
    assert names[0] == "ar"
    assert {(v.block_size, v.ar_weight) for v in VARIANTS if v is not AR and v.random_block_phase} == {
        (block_size, weight) for block_size in (4, 8, 16) for weight in (0.0, 1.0)
    }
    assert Variant(0).name == "start"
    assert Variant(8, random_block_phase=False).name == "mars_B8_ar1_fixed"


def test_tables_of_the_quality_benchmark() -> None:
    mars = Variant(8)
    outcomes = [
        Outcome(AR, 0, HeldOutLosses(0.5, None), 0.1, 9.6, 0.75, {}),
        Outcome(mars, 0, HeldOutLosses(0.25, 1.0), 0.1, 20.0, 1.0, {4: (0.5, 3.0), 8: (1.0, 6.0)}),
        Outcome(mars, 1, HeldOutLosses(0.75, 3.0), 0.1, 20.0, 0.5, {4: (0.5, 3.0), 8: (1.0, 6.0)}),
    ]
    values = json.loads(json.dumps(training_quality.summary(outcomes)))
    assert values["means"] == {
        "ar": {"one_token_accuracy": 0.75, "one_token_loss": 0.5, "mask_loss": None, "seeds": 1},
        mars.name: {"one_token_accuracy": 0.75, "one_token_loss": 0.5, "mask_loss": 2.0, "seeds": 2},
    }
    assert values["outcomes"][1]["tau"] == {"4": [0.5, 3.0], "8": [1.0, 6.0]}
    lines = training_quality.table(outcomes).splitlines()
    assert lines[-3].split()[:2] == ["ar", "0"]
    assert lines[-1].split()[:2] == [mars.name, "1"]


def test_finetune_needs_its_inputs() -> None:
    with pytest.raises(SystemExit):
        training_quality._options(["finetune", "--model", "m"])
    options = training_quality._options(["--quick"])
    assert isinstance(options, Namespace)
    assert options.steps < 50
