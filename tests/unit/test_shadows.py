"""Whose weights the lists and dicts of a user's follow."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.shadows.finding import Weights, find_shadows


class Holder:
    """An object of the user's own."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def net(width: int = 3) -> nn.Module:
    """Two blocks of the same shapes, with a norm that has buffers, and an end."""
    made = nn.Module()
    made.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(2))
    made.end = nn.Linear(width, 2)
    for p in made.parameters():
        nn.init.normal_(p)
    return made


def copies(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def found_in(module: nn.Module, **others: Any) -> tuple[dict[str, list[str]], list[str]]:
    found, unclear = find_shadows({"": module, **others}, Weights(module))
    return {x.path: list(x.names.values()) for x in found}, unclear


def test_a_list_follows_the_module_of_its_shapes() -> None:
    module = net()
    names = [name for name, _ in module.named_parameters()]
    module.ema = Holder(shadows=[torch.zeros_like(x) for x in copies(module)], decay=0.9, steps=[1, 2])
    assert found_in(module) == ({"ema.shadows": names}, [])


def test_of_modules_of_the_same_shapes_the_one_of_its_values() -> None:
    module = net()
    module.average = copies(module.blocks[1])  # type: ignore[index, arg-type]
    module.other = [x + 1 for x in module.average]
    found, unclear = found_in(module)
    assert found == {"average": [f"blocks.1.{name}" for name, _ in module.blocks[1].named_parameters()]}  # type: ignore[index, union-attr]
    assert unclear == ["other"]


def test_several_modules_one_after_another() -> None:
    module = net()
    first, second, end = module.blocks[0], module.blocks[1], module.end  # type: ignore[index]
    module.ahead = [*copies(module.end), *copies(module.blocks)]  # type: ignore[arg-type]
    module.turned = [*copies(second), *copies(first)]  # type: ignore[arg-type]
    module.later = [x * 3 for x in module.ahead]  # as a checkpoint has it
    names = {
        path: [f"{path}.{name}" for name, _ in module.get_submodule(path).named_parameters()]
        for path in ("blocks", "end")
    }
    found, unclear = found_in(module)
    assert found["ahead"] == found["later"] == [*names["end"], *names["blocks"]]
    assert found["turned"] == [*names["blocks"][4:], *names["blocks"][:4]]
    assert not unclear and end is module.end


def test_trained_parameters_alone_and_whole_state_dicts() -> None:
    module = net()
    module.blocks[0].requires_grad_(False)  # type: ignore[index, union-attr]
    trained = {name: p.detach() * 2 for name, p in module.named_parameters() if p.requires_grad}
    callback = Holder(state=OrderedDict((name, x.clone()) for name, x in module.state_dict().items()))
    module.trained = trained
    found, unclear = found_in(module, callback=callback)
    assert found == {"trained": list(trained), "callback.state": list(module.state_dict())}
    assert not unclear


def test_buffers_beside_others() -> None:
    module, average = net(), nn.Module()
    average.register_buffer("decay", torch.tensor(0.9))
    for name, p in module.named_parameters():
        average.register_buffer(name.replace(".", ""), p.detach() + 1)
    names = [name for name, _ in module.named_parameters()]
    module.average = average
    assert found_in(module) == ({"average._buffers": names}, [])


def test_what_follows_nothing() -> None:
    module = net(5)
    module.tables = [torch.zeros(4, 4), torch.zeros(4)]  # other shapes
    module.one = [module.end.weight.detach().clone()]  # type: ignore[union-attr, operator]
    module.flat = [p.detach().clone() for p in module.parameters() if p.dim() == 1]
    module.mixed = [*copies(module), "name"]
    module.pair = [torch.zeros(2, 5), torch.zeros(2, 5)]  # the shape of one weight, twice
    module.batch = [torch.zeros(2, 5), torch.tensor([3, 1])]  # features and labels, of the shapes of `end`
    module.same = list(module.parameters())  # the parameters themselves
    assert found_in(module) == ({}, [])


def test_shapes_outlive_the_weights() -> None:
    module = net()
    names = [name for name, _ in module.named_parameters()]
    whole = Weights(module).without_values()
    shadows = copies(module)
    found, _ = find_shadows({"": Holder(shadows=shadows)}, whole)
    assert [list(x.names.values()) for x in found] == [names]
    assert all(x.is_meta for lists in whole._by_first.values() for _, named in lists for _, x in named)
