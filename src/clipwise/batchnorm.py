"""BatchNorm mixes examples; GroupNorm does not."""

from __future__ import annotations

from torch import nn

from .errors import Refusal

_PLAIN = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}
_MOST_GROUPS, _FEWEST_CHANNELS = 32, 4  # Wu & He 2018: 32 groups; a group of few channels normalises little else than itself


class CannotReplace(Refusal):
    """A BatchNorm layer for which no GroupNorm can stand in."""


def replace_batchnorm(model: nn.Module, groups: int | None = None) -> nn.Module:
    """Replace every BatchNorm layer of `model` by GroupNorm, in place, and return the model.

    Scale and shift are carried over, with their names, device, precision and whether they are trained; running statistics have
    no counterpart and are dropped, so a trained network needs some training again. `groups` is the number of groups, by default
    the largest divisor of the channels up to 32 that leaves four channels in a group. Refused, before anything is changed:
    lazy layers, subclasses with a forward of their own, parametrized layers, and channels that cannot be divided.

        model = clipwise.replace_batchnorm(torchvision.models.resnet18())
    """
    found = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase) and _is_batch(module)
    }
    made = {id(module): _group_norm(name, module, groups) for name, module in found.items()}
    if id(model) in made:
        return made[id(model)]
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # named_children leaves out a layer's second name
            if id(child) in made:
                parent._modules[name] = made[id(child)]
    return model


def _is_batch(module: nn.Module) -> bool:
    return not isinstance(module, nn.modules.instancenorm._InstanceNorm)


def _group_norm(name: str, layer: nn.modules.batchnorm._NormBase, groups: int | None) -> nn.GroupNorm:
    where = f"{name or 'the model itself'}, a {type(layer).__name__},"
    if type(layer) not in _PLAIN:
        raise CannotReplace(
            f"{where} is lazy, parametrized, or a class of its own: what it computes is not known.",
            "Run the model once first if it is lazy; otherwise replace that layer by hand.",
        )
    channels = layer.num_features
    count = groups if groups is not None else _groups(channels)
    if channels % count or (isinstance(layer, nn.BatchNorm1d) and channels == count):
        raise CannotReplace(
            f"{where} has {channels} channels, which {count} groups cannot share: every group needs the same number, and without "
            "other axes more than one.",
            "Pass a number of groups that divides every layer's channels, or replace that layer by hand.",
        )
    made = nn.GroupNorm(count, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)


def _groups(channels: int) -> int:
    """The largest divisor up to 32 that leaves four channels in a group; one group where there is none."""
    return max((g for g in range(1, _MOST_GROUPS + 1) if channels % g == 0 and channels // g >= _FEWEST_CHANNELS), default=1)
