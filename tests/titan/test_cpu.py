import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torchtitan.components import metrics
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed import parallel_dims
from torchtitan.models.common.attention import (
    FlexAttention,
    VarlenAttention,
    create_varlen_metadata_for_document,
)
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools import utils

from tests.titan.launch import train, write_config
from torchtitan_zephon.titan.cpu import (
    DocumentSDPA,
    adapt_config_for_cpu,
    cpu_faults,
    running_on_cpu,
    use_cpu_if_no_accelerator,
)

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="what is done without an accelerator"
)

# Two rows of eight tokens: documents of 3, 1 and 4 tokens, and of 8.
POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3, 3]])


def random_qkv(kv_heads=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 8, 4, 16), (2, 8, kv_heads, 16), (2, 8, kv_heads, 16)]
    tensors = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def dense_reference(q, k, v, **kwargs):
    """One masked attention over whole rows: what the ragged one has to equal."""
    same_document = DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :]
    mask = same_document & torch.ones(8, 8, dtype=torch.bool).tril()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **kwargs).transpose(1, 2)


def assert_same_values_and_gradients(kv_heads=4, **kwargs):
    attention = DocumentSDPA.Config().build()
    metadata = create_varlen_metadata_for_document(POSITIONS)
    ours, theirs = random_qkv(kv_heads), random_qkv(kv_heads)
    out = attention(*ours, attention_masks=metadata, **kwargs)
    expected = dense_reference(*theirs, **kwargs)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


def test_attention_and_its_gradients_equal_a_dense_document_mask():
    assert_same_values_and_gradients()


def test_grouped_query_heads_and_a_scale_equal_a_dense_document_mask():
    assert_same_values_and_gradients(kv_heads=2, scale=0.5, enable_gqa=True)


def test_a_token_sees_its_own_document_up_to_itself_and_nothing_else():
    q, k, v = random_qkv()
    metadata = create_varlen_metadata_for_document(POSITIONS)
    out = DocumentSDPA.Config().build()(q, k, v, attention_masks=metadata)
    out[0, 6].sum().backward()
    assert v.grad is not None
    seen = v.grad.abs().sum((2, 3)) > 0
    assert seen.int().tolist() == [[0, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0]]


def test_attention_keeps_the_dtype_it_is_given():
    metadata = create_varlen_metadata_for_document(POSITIONS)
    q, k, v = random_qkv(dtype=torch.bfloat16)
    out = DocumentSDPA.Config().build()(q, k, v, attention_masks=metadata)
    assert (out.dtype, out.shape) == (torch.bfloat16, (2, 8, 4, 16))


def test_gradients_are_the_same_under_activation_checkpointing():
    attention = DocumentSDPA.Config().build()
    metadata = create_varlen_metadata_for_document(POSITIONS)
    plain, saved = random_qkv(), random_qkv()
    attention(*plain, attention_masks=metadata).square().sum().backward()
    out = checkpoint(attention, *saved, attention_masks=metadata, use_reentrant=False)
    out.square().sum().backward()
    for x, y in zip(plain, saved, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)


def test_a_sliding_window_is_refused_when_the_model_is_built():
    with pytest.raises(ValueError, match=r"attention window \(128, 0\) has no CPU implementation"):
        DocumentSDPA.Config(window_size=(128, 0)).build()


def test_all_of_torchtitan_is_pointed_at_the_cpu():
    assert use_cpu_if_no_accelerator()
    assert use_cpu_if_no_accelerator()
    assert running_on_cpu()
    assert (parallel_dims.device_type, metrics.device_type) == ("cpu", "cpu")
    assert utils.get_local_device() == torch.device("cpu")
    stats = metrics.DeviceMemoryMonitor("cpu").get_peak_stats()
    assert 0 < stats.max_reserved_pct < 100


def test_modules_imported_before_and_after_are_pointed_at_the_cpu():
    code = (
        "import torchtitan.distributed.utils as before\n"
        "from torchtitan_zephon.titan.cpu import use_cpu_if_no_accelerator\n"
        "use_cpu_if_no_accelerator()\n"
        "import torchtitan.models.common.token_dispatcher as after\n"
        "print(before.device_type, before.get_local_device(), after.device_type)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["cpu", "cpu", "cpu"]


def test_each_layer_gets_the_attention_that_the_cpu_has():
    config = llama3_debugmodel()
    adapt_config_for_cpu(config)
    assert config.model_spec is not None
    model = config.model_spec.model
    assert list(model.traverse(FlexAttention.Config)) == []
    kinds = [type(found) for _, found, _, _ in model.traverse(VarlenAttention.Config)]
    assert kinds == [DocumentSDPA.Config] * 6
    assert config.training.mixed_precision_param == "float32"
    assert config.training.disable_cuda_graphs


def test_settings_that_need_an_accelerator_are_named_one_by_one():
    config = llama3_debugmodel()
    assert cpu_faults(config) == []
    config.parallelism.context_parallel_degree = 2
    config.profiler.enable_memory_snapshot = True
    config.checkpoint = CheckpointManager.Config(async_mode="async_with_pinned_mem")
    assert [fault.partition(":")[0] for fault in cpu_faults(config)] == [
        "parallelism.context_parallel_degree = 2",
        "profiler.enable_memory_snapshot = true",
        'checkpoint.async_mode = "async_with_pinned_mem"',
    ]


def test_nothing_changes_where_torch_reports_an_accelerator(monkeypatch):
    before = {n: getattr(utils, n) for n in ("device_type", "device_module", "get_local_device")}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert use_cpu_if_no_accelerator() is False
    assert {n: getattr(utils, n) for n in before} == before


@pytest.mark.slow
def test_the_first_losses_are_the_same_under_every_parallelism(tmp_path):
    config = write_config(tmp_path)

    def losses(ranks, name, *flags):
        flags = ["--dump_folder", f"{tmp_path}/{name}", "--training.steps", "2", *flags]
        always = ["--metrics.log_freq", "1", "--training.local_batch_size", "2"]
        output = train(ranks, config, *always, *flags)
        # Ranks without the last stage of a pipeline log a negative loss.
        logged = sorted(set(re.findall(r"step: +(\d+)  loss: +(\d\S*)", output)))
        assert [step for step, _ in logged] == ["1", "2"]
        return [float(loss) for _, loss in logged]

    # Ranks that shard a model draw its first weights in another way, so all start from these.
    seed = ["--dump_folder", f"{tmp_path}/seed", "--checkpoint.create_seed_checkpoint"]
    train(1, config, *seed)
    start = ["--checkpoint.initial_load_path", f"{tmp_path}/seed/checkpoint/step-0"]
    expected = losses(1, "one", *start)
    schedule = ["--parallelism.pipeline_parallel_schedule", "1F1B"]
    data = ("data_parallel_replicate", "data_parallel_shard")
    for kind in (*data, "tensor_parallel", "pipeline_parallel"):
        degree = [f"--parallelism.{kind}_degree", "2"]
        found = losses(2, kind, *start, *schedule, *degree)
        assert found == pytest.approx(expected, abs=1e-4), kind
