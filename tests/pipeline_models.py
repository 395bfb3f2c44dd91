"""Small models for slicing, with steps as people write them. Nothing here knows this package.

Shape suffixes: B batch, L sequence, D hidden, V vocabulary, C channels.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy

VOCAB, HIDDEN, CLASSES = 17, 8, 5


class Logged(nn.Module):
    """A module with the logging methods of a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, Any] = {}

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        self.logged[name] = value.detach().clone() if isinstance(value, Tensor) else value

    def log_dict(self, dictionary: dict[str, Any], **kwargs: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value)


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, hidden: int = HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.dropout = dropout

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD + F.dropout(self.down(F.gelu(self.up(self.norm(x_BLD)))), self.dropout, self.training)


class GPT(Logged):
    """Embedding, learned positions added in the step, blocks, head."""

    def __init__(self, layers: int = 4, hidden: int = HIDDEN, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, hidden)
        self.positions = nn.Parameter(torch.randn(64, hidden))
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def embed(self, ids_BL: Tensor) -> Tensor:
        return self.tokens(ids_BL) + self.positions[: ids_BL.shape[1]]

    def middle(self, x_BLD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return x_BLD

    def forward(self, ids_BL: Tensor) -> Tensor:
        return self.head(self.norm(self.middle(self.embed(ids_BL))))

    def loss(self, logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
        return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        loss = self.loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


class TiedByFunction(GPT):
    """The head is F.linear with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids_BL: Tensor) -> Tensor:
        return F.linear(self.norm(self.middle(self.embed(ids_BL))), self.tokens.weight)


class Regularised(GPT):
    """Adds the squares of all parameters."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        loss = super().training_step(batch)
        return {"loss": loss + 1e-2 * sum(p.pow(2).sum() for p in self.parameters()), "plain": loss.detach()}


class Auxiliary(GPT):
    """Adds a loss of every block's output, in place."""

    def middle(self, x_BLD: Tensor) -> Tensor:
        self.extra = x_BLD.new_zeros(())
        for block in self.blocks:
            x_BLD = block(x_BLD)
            self.extra += x_BLD.pow(2).mean()
        return x_BLD

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        loss = super().training_step(batch) + 0.1 * self.extra
        del self.extra
        return loss


class Twice(GPT):
    """Calls the model twice, and wants the results alike."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        first = self(batch[0])
        second = self(batch[0].flip(1))
        return self.loss(first, batch[1]) + F.mse_loss(first, second)


class SharedBlock(GPT):
    """The same block, several times in a row."""

    def middle(self, x_BLD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BLD = block(block(x_BLD))
        return x_BLD


@dataclass(frozen=True)
class Features:
    """What blocks hand on: hidden states, all of them so far, and how many were added."""

    hidden: Tensor
    levels: list[Tensor]
    added: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.hidden, Tensor):
            raise TypeError("hidden states are a tensor")


@dataclass
class Context:
    """What all blocks are given."""

    scale_B11: Tensor
    factor: float


class FeatureBlock(Block):
    def forward(self, features: Any, context: Any) -> Any:  # type: ignore[override]
        hidden = super().forward(features.hidden) * context.scale_B11 * context.factor
        return Features(hidden, [*features.levels, hidden], features.added + 1)


class WithDataclasses(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeatureBlock() for _ in range(4))

    def middle(self, x_BLD: Tensor) -> Tensor:
        features = Features(x_BLD, [])
        context = Context(torch.full((len(x_BLD), 1, 1), 0.9, dtype=x_BLD.dtype), 1.1)
        for block in self.blocks:
            features = block(features, context)
        return features.hidden + sum(features.levels) / features.added


class Record(dict[str, Any]):
    """Entries that are attributes, too."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__ = self


class Output(OrderedDict[str, Any]):
    """Entries, and an attribute beside them."""

    def __init__(self, hidden: Tensor, levels: list[Tensor]) -> None:
        super().__init__(hidden=hidden)
        self.levels = levels


class RecordBlock(Block):
    def forward(self, record: Any) -> Any:  # type: ignore[override]
        hidden = super().forward(record.output["hidden"]) * record["factor"]
        return Record(output=Output(hidden, [*record.output.levels, hidden]), factor=record.factor * 0.9)


class WithDicts(GPT):
    """Its blocks hand on dicts of their own classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RecordBlock() for _ in range(4))

    def middle(self, x_BLD: Tensor) -> Tensor:
        record = Record(output=Output(x_BLD, []), factor=1.1)
        for block in self.blocks:
            record = block(record)
        hidden: Tensor = record.output["hidden"]
        return hidden * record.factor + torch.stack(record.output.levels).mean(0)


class Watched(GPT):
    """Logs values of early blocks, keeps some on itself, counts accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro")

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        x_BLD = self.blocks[0](self.embed(batch[0]))
        self.log("early", x_BLD.square().mean())
        self.early = x_BLD.mean()
        for block in self.blocks[1:]:
            x_BLD = block(x_BLD)
        logits = self.head(self.norm(x_BLD))
        loss = self.loss(logits, batch[1])
        self.outputs.append(loss.detach())
        self.accuracy(logits.flatten(0, 1), batch[1].flatten())
        self.log_dict({"loss": loss, "spread": (x_BLD.max() - x_BLD.min()).detach()})
        self.log("accuracy", self.accuracy)
        return loss


class InPlace(GPT):
    """Activations and residuals changed in place between blocks, across stages too."""

    def middle(self, x_BLD: Tensor) -> Tensor:
        for block in self.blocks:
            y_BLD = block(x_BLD)
            y_BLD += 0.5
            x_BLD = F.relu(y_BLD, inplace=True)
        return x_BLD


class Buffered(GPT):
    """Collects the outputs of all blocks in one tensor."""

    def middle(self, x_BLD: Tensor) -> Tensor:
        collected = torch.zeros(len(self.blocks), *x_BLD.shape, dtype=x_BLD.dtype)
        for i, block in enumerate(self.blocks):
            x_BLD = block(x_BLD)
            collected[i] = x_BLD
        return x_BLD + collected.mean(0)


class Filling(nn.Module):
    """Puts its results into a tensor of its own, part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCAB, HIDDEN), Block()

    def forward(self, ids_BL: Tensor) -> Tensor:
        out = torch.empty(*ids_BL.shape, HIDDEN, dtype=self.embedding.weight.dtype)
        for rows in (slice(0, 1), slice(1, None)):
            out[rows] = self.block(self.embedding(ids_BL[rows]))
        return out


class Filled(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = Filling()  # type: ignore[assignment]


class InPlaceUnit(nn.Module):
    """Changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.linear(F.relu_(x_BLD))


class InPlaceUnits(GPT):
    """Blocks that change their input, which the step uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlaceUnit() for _ in range(4))

    def middle(self, x_BLD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BLD = 1.0 * x_BLD
            x_BLD = block(x_BLD) + x_BLD
        return x_BLD


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad * ctx.factor, None  # not the derivative: a step that looked inside would get other gradients


scale = _Scale.apply


class _Steps(torch.autograd.Function):
    """Returns what it has filled, as solvers of differential equations do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        steps = torch.empty(2, *x.shape, dtype=x.dtype)
        steps[0], steps[1] = x, x.tanh()
        ctx.save_for_backward(steps)
        return steps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (steps,) = ctx.saved_tensors
        return grad[0] + grad[1] * (1 - steps[1].square())


@torch.jit.script
def blurred(x: Tensor) -> Tensor:
    return 0.5 * x + 0.5 * x.mean(1, keepdim=True)


class WithFunction(GPT):
    """Autograd functions between blocks, one of them bound when the file was imported, and a scripted function."""

    def middle(self, x_BLD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BLD = blurred(scale(_Scale.apply(block(x_BLD), 0.5), 1.5))
            x_BLD = _Steps.apply(x_BLD)[-1]
        return x_BLD


class Checkpointed(GPT):
    """Activation checkpointing around blocks."""

    reentrant = False

    def middle(self, x_BLD: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i % 2:
                x_BLD = checkpoint(block, x_BLD, use_reentrant=self.reentrant)
            else:
                x_BLD = checkpoint(
                    lambda x, s, b=block: torch.tanh(b(x)) + s, x_BLD, x_BLD, use_reentrant=self.reentrant
                )
        return x_BLD


class CheckpointedClosure(GPT):
    """Checkpointed functions that take a value from around them."""

    def middle(self, x_BLD: Tensor) -> Tensor:
        first_BLD = x_BLD
        for block in self.blocks:
            x_BLD = checkpoint(lambda x, b=block: torch.tanh(b(x)) + first_BLD, x_BLD, use_reentrant=False)
        return x_BLD


class CheckpointedReentrant(Checkpointed):
    """The older kind, an autograd function."""

    reentrant = True


class Branching(GPT):
    """What it logs depends on the step's number and on the loss."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        logits = self(batch[0])
        if batch_idx % 2:
            self.log("norm", logits.norm())
        loss = self.loss(logits, batch[1])
        if loss.item() > 0.5:
            loss = loss * 2
        return loss


class Cleaning(GPT):
    """Contexts, try and finally around everything."""

    def __init__(self) -> None:
        super().__init__()
        self.finished = 0

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        x_BLD = self.embed(batch[0])
        for block in self.blocks:
            try:
                with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
                    x_BLD = block(x_BLD)
            except ValueError:
                x_BLD = x_BLD + 1
            finally:
                x_BLD = x_BLD * 1.25
                with torch.no_grad():
                    self.finished += 1
        return self.loss(self.head(self.norm(x_BLD)), batch[1])


class InputsWithGradient(Logged):
    """Asks for the gradient of what it takes, as Hugging Face's speech models do; its first blocks learn nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[:2].requires_grad_(False)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        x_BLD = self.blocks[0](batch[0])
        first_BLD = batch[0][:, :]
        first_BLD.requires_grad = True
        batch[0].requires_grad = True
        x_BLD = self.blocks[1](x_BLD + first_BLD) + self.blocks[1](batch[0])
        for block in self.blocks[2:]:
            x_BLD = block(x_BLD * batch[0].detach())
        return F.cross_entropy(self.head(x_BLD.mean(1)), batch[1])


class Entry(torch.autograd.Function):
    """`x[row, column]` of indices that are tensors, for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return x.flatten().index_select(0, (row * x.shape[1] + column)[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)


class MaskedByFunction(GPT):
    """A mask of the batch and of a buffer, computed by torch.func for single pairs of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.tensor(4))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        ids_BL = batch[0]

        def sees(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
            near = (query - key).abs() < self.window
            return near & (Entry.apply(ids_BL, row, key) > 2)

        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            sees = torch.vmap(sees, dims)
        mask_BLL = sees(*(torch.arange(size) for size in (*ids_BL.shape, ids_BL.shape[1])))
        x_BLD = self.embed(ids_BL)
        for block in self.blocks:
            x_BLD = block(mask_BLL.to(x_BLD) @ x_BLD)
        return self.loss(self.head(x_BLD), batch[1])


class Noisy(GPT):
    """Random numbers that all stages use."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        noise = torch.rand(batch[0].shape[0], 1, 1, dtype=self.positions.dtype)
        x_BLD = self.embed(batch[0])
        for block in self.blocks:
            x_BLD = block(x_BLD * noise)
        return self.loss(self.head(x_BLD), batch[1])


class MaskedLikeHidden(GPT):
    """A mask takes the dtype of hidden states, and is looked at on the host; so is one with gradients."""

    def middle(self, x_BLD: Tensor) -> Tensor:
        mask_L1 = torch.ones(x_BLD.shape[1], 1).to(x_BLD)
        scale_LD = self.positions[: x_BLD.shape[1]].type_as(x_BLD)
        x_BLD = x_BLD.relu().type(x_BLD.type())
        for block in self.blocks:
            x_BLD = block(x_BLD if bool((mask_L1 < 1).any()) else x_BLD * mask_L1 + scale_LD)
        return x_BLD


class Frozen(GPT):
    """The first block learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.positions.requires_grad_(False)


def count_and_double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    module.calls += 1
    return 2 * out


class Hooked(GPT):
    """Counts the calls of blocks by hooks, which also double what the blocks return."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.calls = 0
            block.register_forward_hook(count_and_double)


class Keeping(Block):
    """Keeps what it computes where other code can find it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None
        self.inner: Tensor | None = None

    def forward(self, x_BLD: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        self.inner = self.norm(x_BLD)
        self.seen = super().forward(x_BLD)
        if seen is not None:
            seen.append(self.seen)
        return self.seen


class Leaking(GPT):
    """What blocks keep is used by a function of the test's."""

    def __init__(self, function: Callable[[Leaking, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping() for _ in range(4))
        self.function = function

    def middle(self, x_BLD: Tensor) -> Tensor:
        return self.function(self, x_BLD)


class Classifier(Logged):
    """torch's encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        logits = self.head(self.encoder(self.embedding(batch[0])).mean(1))
        self.log("accuracy", (logits.argmax(-1) == batch[1]).float().mean())
        return F.cross_entropy(logits, batch[1])


class Sequence(Logged):
    """Linears with activations between."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [HIDDEN, 16, 16, 16, CLASSES]
        layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(sizes)]
        self.net = nn.Sequential(*[part for pair in layers for part in pair][:-1])

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


class UNet(Logged):
    """Skips over stages."""

    def __init__(self) -> None:
        super().__init__()

        def convolution(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU())

        self.down1, self.down2, self.middle = convolution(3, 4), convolution(4, 8), convolution(8, 8)
        self.up2, self.up1, self.out = convolution(16, 4), convolution(8, 4), nn.Conv2d(4, 2, 1)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        a = self.down1(batch[0])
        b = self.down2(F.max_pool2d(a, 2))
        x = self.middle(F.max_pool2d(b, 2))
        x = self.up2(torch.cat([F.interpolate(x, size=b.shape[-2:]), b], 1))
        x = self.up1(torch.cat([F.interpolate(x, size=a.shape[-2:]), a], 1))
        return F.cross_entropy(self.out(x), batch[1])


class DecoderBlock(nn.Module):
    """Attends to what the encoder made, with a bias it gets from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)

    def forward(self, x_BLD: Tensor, encoded_BLD: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        k_BLD, v_BLD = self.kv(encoded_BLD).chunk(2, -1)
        return x_BLD + F.scaled_dot_product_attention(self.q(x_BLD), k_BLD, v_BLD, attn_mask=bias), bias


class EncoderDecoder(Logged):
    """T5-like: a shared embedding, a bias made once, the encoder's output used by every decoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.bias = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(32, 1)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(DecoderBlock() for _ in range(3))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.shared.weight

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        encoded_BLD = self.shared(batch[0])
        for block in self.encoder:
            encoded_BLD = block(encoded_BLD)
        x_BLD, length = self.shared(batch[1]), batch[1].shape[1]
        distance = (torch.arange(length)[:, None] - torch.arange(batch[0].shape[1])[None]).clamp(-16, 15) + 16
        bias = self.bias(distance).squeeze(-1)
        for block in self.decoder:
            x_BLD, bias = block(x_BLD, encoded_BLD, bias)
        return F.cross_entropy(self.head(x_BLD).flatten(0, 1), batch[1].flatten())


class ResidualBlock(nn.Module):
    """With batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW + F.relu(self.norm(self.a(x_BCHW)))


class ResNet(Logged):
    """Stages of blocks, as torchvision has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(ResidualBlock(4), ResidualBlock(4))
        self.layer2 = nn.Sequential(ResidualBlock(4), ResidualBlock(4))
        self.head = nn.Linear(4, CLASSES)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        x_BCHW = self.layer2(self.layer1(F.relu(self.stem_norm(self.stem(batch[0])))))
        return F.cross_entropy(self.head(x_BCHW.mean((2, 3))), batch[1])


class Recurrent(Logged):
    """Recurrent layers return tuples, and keep a list of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(nn.LSTM(HIDDEN, HIDDEN, batch_first=True) for _ in range(3))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        x_BLD, state = self.embedding(batch[0]), None
        for layer in self.layers:
            x_BLD, state = layer(x_BLD, state)
        return F.cross_entropy(self.head(x_BLD[:, -1]), batch[1])


@dataclass(frozen=True)
class Case:
    """A model and its batch."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]


def tokens(length: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCAB, (3, length)), torch.randint(0, VOCAB, (3, length))


def labelled() -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCAB, (3, 6)), torch.randint(0, CLASSES, (3,))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8, dtype=torch.double), torch.randint(0, CLASSES, (4,))


class Gate(nn.Module):
    """Makes a distribution inside of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD * torch.distributions.Bernoulli(logits=self.up(x_BLD)).mean


class Distributed(GPT):
    """Makes distributions of what early and late units make; torch looks at the values of their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Gate() for _ in range(2))

    def middle(self, x_BLD: Tensor) -> Tensor:
        def normal(y_BLD: Tensor) -> torch.distributions.Normal:
            return torch.distributions.Normal(y_BLD, F.softplus(y_BLD))

        prior = normal(self.gates[0](self.blocks[0](x_BLD)))
        posterior = normal(self.gates[1](self.blocks[3](prior.mean)))
        self.divergence = torch.distributions.kl_divergence(posterior, prior).mean()
        return self.blocks[2](self.blocks[1](posterior.mean)) + posterior.stddev

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return super().training_step(batch) + self.divergence


CASES = {
    "gpt": Case(GPT, tokens),
    "tied": Case(lambda: GPT(tied=True), tokens),
    "tied by function": Case(TiedByFunction, tokens),
    "regularised": Case(Regularised, tokens),
    "regularised, tied": Case(lambda: _tied(Regularised()), tokens),
    "auxiliary loss": Case(Auxiliary, tokens),
    "model called twice": Case(Twice, tokens),
    "shared block": Case(SharedBlock, tokens),
    "watched": Case(Watched, tokens),
    "dataclasses": Case(WithDataclasses, tokens),
    "dicts of their own classes": Case(WithDicts, tokens),
    "in place": Case(InPlace, tokens),
    "in place, into one tensor": Case(Buffered, tokens),
    "in place, by units": Case(InPlaceUnits, tokens),
    "filled by a unit": Case(Filled, tokens),
    "distributions": Case(Distributed, tokens),
    "autograd function": Case(WithFunction, tokens),
    "checkpointed": Case(Checkpointed, tokens),
    "checkpointed closure": Case(CheckpointedClosure, tokens),
    "checkpointed, reentrant": Case(CheckpointedReentrant, tokens),
    "branching": Case(Branching, tokens),
    "cleaning": Case(Cleaning, tokens),
    "inputs with gradient": Case(
        InputsWithGradient, lambda: (torch.randn(3, 6, HIDDEN, dtype=torch.double), torch.tensor([0, 1, 4]))
    ),
    "masked by a function": Case(MaskedByFunction, tokens),
    "masked like hidden states": Case(MaskedLikeHidden, tokens),
    "frozen": Case(Frozen, tokens),
    "hooked": Case(Hooked, tokens),
    "encoder": Case(Classifier, labelled),
    "sequential": Case(
        Sequence, lambda: {"x": torch.randn(3, HIDDEN, dtype=torch.double), "y": torch.tensor([0, 1, 4])}
    ),
    "u-net": Case(UNet, lambda: (images()[0], torch.randint(0, 2, (4, 8, 8)))),
    "encoder-decoder": Case(EncoderDecoder, lambda: (tokens(6)[0], tokens(4)[0])),
    "resnet": Case(ResNet, images),
    "recurrent": Case(Recurrent, labelled),
}


class Asking(GPT):
    """A GPT whose embedded tokens go through a function of the test's."""

    def __init__(self, function: Callable[[GPT, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def embed(self, ids_BL: Tensor) -> Tensor:
        return self.function(self, self.blocks[0](super().embed(ids_BL)))


def _tied(model: GPT) -> GPT:
    model.head.weight = model.tokens.weight
    return model
