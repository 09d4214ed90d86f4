"""TorchTitan 0.3.0 on a machine with no accelerator: gloo, float32, attention per document.

TorchTitan reads its device once, when `torchtitan.tools.utils` is imported, and falls back to
CUDA when it finds none. `use_cpu_if_no_accelerator` points it at the CPU instead, and
`adapt_config_for_cpu` replaces what has no CPU kernel in a configuration. Both do nothing
where there is an accelerator.
"""

import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

CAUSAL = (-1, 0)


class CpuDeviceModule:
    """The calls TorchTitan makes on `torch.cuda`, answered for the CPU.

    "Memory" is that of this process: its peak resident set, against the RAM of the machine.
    """

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any) -> None:
        """Nothing to choose from: there is one CPU device."""

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """Nothing to wait for: CPU kernels have run when their call returns."""

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(name="CPU", total_memory=total)

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        """The peak resident set of a process cannot be reset."""

    @staticmethod
    def empty_cache() -> None:
        """The CPU allocator keeps no cache."""


def running_on_cpu() -> bool:
    """Whether TorchTitan's device, in this process, is the CPU."""
    return utils.device_type == "cpu"


def use_cpu_if_no_accelerator() -> bool:
    """Make TorchTitan train on the CPU through gloo if torch reports no accelerator.

    Returns whether it does. To be called before a `Trainer` is built; calling it again is free.
    """
    if torch.accelerator.is_available():
        return False
    if running_on_cpu():
        return True
    replacements: dict[str, Any] = {
        "device_type": "cpu",
        "device_module": CpuDeviceModule(),
        # No index: FSDP and DTensor compare devices, and to them "cpu:0" is not "cpu".
        "get_local_device": lambda: torch.device("cpu"),
    }
    stale = {name: getattr(utils, name) for name in replacements}
    # Modules that were imported earlier hold the old values under the same names.
    for module in [m for n, m in sys.modules.items() if n.startswith("torchtitan.")]:
        for name, new in replacements.items():
            if vars(module).get(name) is stale[name]:
                setattr(module, name, new)
    return True


class DocumentSDPA(VarlenAttention):
    """Causal attention inside each document by `F.scaled_dot_product_attention`.

    As a `VarlenAttention` it is handed the documents' offsets by the trainer. Takes and returns
    (batch, length, heads, head size), like its parent, but in the caller's dtype.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.window_size != CAUSAL:
            raise ValueError(
                f"attention window {config.window_size} has no CPU implementation; "
                f"only {CAUSAL} (causal, unlimited) has"
            )

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if out_transform is not None:
            raise NotImplementedError(
                "this model transforms attention by its log-sum-exp, which the CPU's "
                "scaled_dot_product_attention does not return; train it on an accelerator"
            )
        # Documents are a ragged, rank-local split, which SPMD types do not describe.
        with spmd.no_typecheck():
            lengths = attention_masks.cu_seq_q.diff().tolist()
            # (B, L, N, H) -> (N, T, H), T = B * L: no document crosses a row.
            q, k, v = (x.flatten(0, 1).transpose(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
            documents = zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True)
            attend = partial(
                F.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=enable_gqa
            )
            # A batch dimension of one, because the fused CPU kernel takes four dimensions only.
            outs = [attend(*(x.unsqueeze(0) for x in document)) for document in documents]
            out = torch.cat(outs, dim=2)[0].transpose(0, 1).unflatten(0, q_BLNH.shape[:2])
        if spmd.is_type_checking():
            spmd.assert_type(out, spmd.get_local_type(q_BLNH), spmd.get_partition_spec(q_BLNH))
        return out


def adapt_config_for_cpu(config: Trainer.Config) -> None:
    """Change, in place, what a registry entry asks for and the CPU cannot do, or does slowly.

    Call it before the user's own settings are applied, so that these win.
    """
    # A step of the debug model takes half as long again in bfloat16, even on a CPU (AVX-512 BF16)
    # whose bfloat16 matmuls are twice as fast: the casts and all other operations are slower.
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.compile.enable = False
    spec = config.model_spec
    if spec is None:
        return
    attentions = (FlexAttention.Config, VarlenAttention.Config)
    # Listed before any is replaced, since a replacement is a VarlenAttention.Config again.
    found = [entry for kind in attentions for entry in spec.model.traverse(kind)]
    for _, old, parent, name in found:
        window = old.window_size if isinstance(old, VarlenAttention.Config) else CAUSAL
        new = DocumentSDPA.Config(window_size=window)
        if isinstance(parent, list):
            parent[cast(int, name)] = new
        else:
            setattr(parent, cast(str, name), new)
    spec.parallelize_fn = partial(_parallelize_with_plain_sums, spec.parallelize_fn)


def _parallelize_with_plain_sums(parallelize: Callable, model: torch.nn.Module, **kwargs: Any):
    """Parallelise a model, then make FSDP reduce gradients by SUM, the reduction gloo has.

    FSDP2 folds its gradient division into the collective as PREMUL_SUM, which only NCCL knows.
    """
    model = parallelize(model, **kwargs)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def cpu_faults(config: Trainer.Config) -> list[str]:
    """The settings of `config` that cannot work on the CPU, one readable line each."""
    faults = []
    if (degree := config.parallelism.context_parallel_degree) > 1:
        faults.append(
            f"parallelism.context_parallel_degree = {degree}: context parallelism needs "
            "FlexAttention, which has no backward pass on the CPU; set it to 1, or use a GPU"
        )
    if config.profiler.enable_memory_snapshot:
        faults.append(
            "profiler.enable_memory_snapshot = true: snapshots record an accelerator's memory, "
            "and this machine has none"
        )
    if getattr(config.checkpoint, "async_mode", None) == "async_with_pinned_mem":
        faults.append(
            'checkpoint.async_mode = "async_with_pinned_mem": pinned memory needs an accelerator; '
            'use "async" or "disabled"'
        )
    return faults
