"""Loss sums and their gradients: against transformers, by hand, and however a batch is cut up."""

from types import SimpleNamespace

import pytest
import torch
from largest_tensor import LargestTensor
from tiny_models import MASK_ID, VOCAB_SIZE, random_samples, tiny_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from workers.errors import InputError
from workers.models.loading import backbone_and_head
from workers.objectives.attention import attention_windows
from workers.objectives.losses import LOGITS_IN_MEMORY, LossModule, LossSums, chunked_cross_entropy
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import PackedBatch, Sample

MARS = MarsObjective(4, 0.7, 1.0, True, MASK_ID, seed=2)
AR = MarsObjective(1, 1.0, 0.0, False, MASK_ID, seed=2)


def run(
    model: PreTrainedModel, objective: MarsObjective, batches: list[PackedBatch], num_chunks: int | None = None
) -> tuple[LossSums, dict[str, Tensor]]:
    """Summed loss sums of the batches, and the gradients of the summed loss."""
    module = LossModule(model, objective, head_chunk=10_000)
    model.zero_grad(set_to_none=True)
    parts = []
    for batch in batches:
        sums = module(batch, module.num_chunks_of(batch) if num_chunks is None else num_chunks)
        sums.loss.backward()
        parts.append(LossSums(*(value.detach() for value in sums)))
    total = LossSums(*(torch.stack(values).sum() for values in zip(*parts, strict=True)))
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(left: tuple[LossSums, dict[str, Tensor]], right: tuple[LossSums, dict[str, Tensor]]) -> None:
    for a, b in zip(left[0], right[0], strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=1e-5)
    assert left[1].keys() == right[1].keys()
    for name, gradient in left[1].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(gradient, right[1][name], atol=1e-5 * scale, rtol=1e-4)


def transformers_loss(model: PreTrainedModel, sample: Sample) -> Tensor:
    """The sum that transformers computes when every response token is a label."""
    labels_L = torch.full((len(sample.token_ids),), -100)
    for start, end in sample.responses:
        labels_L[start:end] = torch.tensor(sample.token_ids[start:end])
    token_ids_L = torch.tensor(sample.token_ids).long()
    loss: Tensor = model(token_ids_L[None], labels=labels_L[None], num_items_in_batch=torch.tensor(1)).loss
    return loss


@pytest.mark.parametrize("model_type", ["llama", "llama_tied", "qwen2", "gpt2"])
@pytest.mark.parametrize("objective", [AR, MARS], ids=["ar", "mars"])
def test_ar_sum_and_gradient_equal_those_of_transformers(model_type: str, objective: MarsObjective) -> None:
    model = tiny_model(model_type)
    samples = random_samples(4, seed=3)
    batches = objective.pack(samples, row_tokens=90, micro_batch_rows=2)
    ours = run(model, objective, batches)
    model.zero_grad(set_to_none=True)
    expected = torch.stack([transformers_loss(model, sample) for sample in samples]).sum()
    expected.backward()
    torch.testing.assert_close(ours[0].ar_sum, expected.detach(), rtol=1e-5, atol=0)
    if objective is AR:
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_same(ours, (ours[0], gradients))


def test_mask_sum_by_hand() -> None:
    """One response of five tokens in blocks (2 3 4)(5 6), each block a plain causal run of its own."""
    model = tiny_model("llama")
    objective = MarsObjective(3, 0.0, 1.0, False, MASK_ID, seed=0)
    tokens = random_samples(1, seed=11, num_turns=4)[0].token_ids[:7]
    sample = Sample(0, 0, 0, tokens, ((2, 7),))
    (batch,) = objective.pack([sample], row_tokens=50, micro_batch_rows=1)
    sums, _ = run(model, objective, [batch])
    first = model(torch.tensor([[*tokens[:2], MASK_ID, MASK_ID]]).long()).logits[0].log_softmax(-1)
    second = model(torch.tensor([[*tokens[:5], MASK_ID]]).long()).logits[0].log_softmax(-1)
    picks = [first[1, tokens[2]], first[2, tokens[3]], first[3, tokens[4]], second[4, tokens[5]], second[5, tokens[6]]]
    torch.testing.assert_close(sums.mask_sum, -torch.stack(picks).sum().detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(sums.loss, sums.mask_sum)
    assert float(sums.ar_sum) == 0.0


def test_loss_weighs_both_sums() -> None:
    model = tiny_model("qwen2")
    sums, _ = run(model, MARS, MARS.pack(random_samples(3), row_tokens=90, micro_batch_rows=4))
    assert float(sums.ar_sum) > 0
    assert float(sums.mask_sum) > 0
    torch.testing.assert_close(sums.loss, 0.7 * sums.ar_sum + sums.mask_sum)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("objective", [AR, MARS], ids=["sft", "mars"])
def test_packed_and_unpacked_samples_give_the_same_gradient(model_type: str, objective: MarsObjective) -> None:
    """For every parameter, 1e-5 of its gradient's norm in float32."""
    model = tiny_model(model_type)
    samples = random_samples(5, seed=4)
    alone_sums, alone = run(model, objective, objective.pack(samples, row_tokens=1, micro_batch_rows=1))
    assert alone.keys() == dict(model.named_parameters()).keys()
    for row_tokens, micro_batch_rows in [(1, 5), (100, 1), (100, 8), (400, 2)]:
        batches = objective.pack(samples, row_tokens=row_tokens, micro_batch_rows=micro_batch_rows)
        packed_sums, packed = run(model, objective, batches)
        torch.testing.assert_close(packed_sums.loss, alone_sums.loss, atol=0, rtol=1e-5)
        for name, gradient in alone.items():
            error = float((packed[name] - gradient).norm() / gradient.norm())
            # The bias of keys shifts all scores of a query alike: its gradient is rounding.
            assert error < 1e-5 or float(gradient.norm()) < 1e-4, name


@pytest.mark.parametrize("model_type", ["llama", "qwen2_sliding"])
def test_activation_checkpointing_changes_nothing(model_type: str) -> None:
    """Masks by layer type travel through the recomputation too."""
    model = tiny_model(model_type).train()
    batches = MARS.pack(random_samples(4, seed=4), row_tokens=100, micro_batch_rows=4)
    plain = run(model, MARS, batches, num_chunks=3)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(run(model, MARS, batches, num_chunks=3), plain)


@pytest.mark.parametrize("model_type", ["llama_tied", "gpt2"])
def test_any_number_of_chunks_gives_the_same(model_type: str) -> None:
    model = tiny_model(model_type)
    (batch,) = MARS.pack(random_samples(3, seed=4), row_tokens=300, micro_batch_rows=1)
    whole = run(model, MARS, [batch], num_chunks=1)
    for num_chunks in (2, 3, 7, len(batch.source_N), len(batch.source_N) + 5):
        assert_same(run(model, MARS, [batch], num_chunks=num_chunks), whole)


def test_empty_batch_touches_every_parameter_and_adds_nothing() -> None:
    model = tiny_model("llama")
    sums, gradients = run(model, MARS, [MARS.empty_batch()], num_chunks=3)
    assert float(sums.loss) == float(sums.ar_sum) == float(sums.mask_sum) == 0.0
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients.values())


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_the_head_is_called_once_per_chunk_as_a_module(num_chunks: int) -> None:
    """Under ZeRO-3 each call gathers the head from all ranks: a rank with more calls than the others would hang."""
    model = tiny_model("llama")
    calls: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda _module, inputs, _out: calls.append(len(inputs[0])))
    batches = [*MARS.pack(random_samples(2), row_tokens=300, micro_batch_rows=1), MARS.empty_batch()]
    for batch in batches:
        calls.clear()
        run(model, MARS, [batch], num_chunks=num_chunks)
        assert len(calls) == 2 * num_chunks - 1  # forward, and once more in the backward pass for all but the last
        assert max(calls) <= max(1, -(-len(batch.source_N) // num_chunks))


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_logits_of_one_chunk_at_most_are_kept_for_the_backward_pass(num_chunks: int) -> None:
    (batch,) = MARS.pack(random_samples(3), row_tokens=300, micro_batch_rows=1)
    module = LossModule(tiny_model("llama"), MARS)
    weight = module.model.get_output_embeddings().weight
    kept: dict[int, int] = {}  # positions by place in memory: two operations may keep the same tensor

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dim() == 2 and tensor.shape[1] == VOCAB_SIZE and tensor.data_ptr() != weight.data_ptr():
            kept[tensor.data_ptr()] = len(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sums = module(batch, num_chunks)
    assert list(kept.values()) == [-(-len(batch.source_N) // num_chunks)]
    assert bool(torch.isfinite(sums.loss))


def test_chunks_stay_within_head_chunk() -> None:
    module = LossModule(tiny_model("llama"), MARS, head_chunk=7)
    (batch,) = MARS.pack(random_samples(2), row_tokens=300, micro_batch_rows=1)
    num_chunks = module.num_chunks_of(batch)
    assert -(-len(batch.source_N) // num_chunks) <= 7 < -(-len(batch.source_N) // (num_chunks - 1))
    assert module.num_chunks_of(MARS.empty_batch()) == 1


def largest_tensor_of_the_head(vocab_size: int, num_predictions: int, head_chunk: int | None) -> int:
    """Elements of the largest tensor of one forward and backward, counted without computing: on torch's meta device."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        hidden_TD = torch.empty(num_predictions, 8, requires_grad=True)
        source_N = torch.empty(num_predictions, dtype=torch.long)
        weight_N2 = torch.empty(num_predictions, 2)
    module = LossModule(model, AR, head_chunk)
    num_chunks = -(-num_predictions // module.head_chunk)
    _, head, transform = backbone_and_head(model)
    with LargestTensor() as seen:
        sums = chunked_cross_entropy(head, transform, hidden_TD, source_N, source_N, weight_N2, num_chunks=num_chunks)
        sums.sum().backward()
    assert hidden_TD.grad is not None
    return seen.num_elements


@pytest.mark.parametrize("vocab_size", [50_000, 151_936, 262_144])
def test_logits_take_the_same_memory_at_any_length_and_vocabulary(vocab_size: int) -> None:
    """8192 positions of Qwen2.5's vocabulary are 5 GB of logits at once, and 256 MiB by default."""
    for num_predictions in (1024, 8192, 65536):
        largest = largest_tensor_of_the_head(vocab_size, num_predictions, None)
        assert LOGITS_IN_MEMORY // 2 < largest <= LOGITS_IN_MEMORY
        assert largest_tensor_of_the_head(vocab_size, num_predictions, 10**9) == vocab_size * num_predictions


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "granite", "cohere", "cohere2", "phi3", "olmo2"])
def test_logits_equal_those_of_the_model(model_type: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        model_type, **sizes, vocab_size=41, num_key_value_heads=2, head_dim=8, pad_token_id=0, initializer_range=0.3
    )
    if model_type == "granite":
        config.logits_scaling = 3.0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    token_ids = torch.arange(2, 12)[None]
    backbone, head, transform = backbone_and_head(model)
    logits = transform(head(backbone(input_ids=token_ids, use_cache=False).last_hidden_state))
    torch.testing.assert_close(logits, model(token_ids, use_cache=False).logits)


def test_layers_that_no_mask_can_express_are_refused() -> None:
    config = SimpleNamespace(model_type="llama4_text", layer_types=["chunked_attention", "full_attention"])
    config.get_text_config = lambda: config
    with pytest.raises(InputError, match="chunked_attention"):
        attention_windows(config)
