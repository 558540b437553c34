# SPDX-License-Identifier: Apache-2.0
"""Models behind the wrappers that trainers put around them."""

from torch import compile, nn


def compiled(model: nn.Module) -> nn.Module:
    return compile(model)  # pyright: ignore[reportReturnType]


def compiled_inside(model: nn.Module) -> nn.Module:
    for layer in list(model.modules()):
        if type(layer).__name__.endswith("DecoderLayer"):
            layer.mlp = compile(layer.mlp)  # pyright: ignore[reportArgumentType]
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__.endswith("DecoderLayer"))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    return model


def ddp(model: nn.Module) -> nn.Module:
    """As DistributedDataParallel names it, whose constructor wants a process group."""
    return nn.ModuleDict({"module": model})


def all_at_once(model: nn.Module) -> nn.Module:
    return ddp(compiled(checkpointed(compiled_inside(model))))
