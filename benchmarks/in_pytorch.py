"""The models of `step_time.py` in PyTorch, layer by layer, with autocast and `GradScaler`."""

import os

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name

HEADS, BLOCKS = 4, 4


class Convolution(nn.Sequential):
    """A convolution, batch normalization, and ReLU unless `last` is False."""

    def __init__(self, taken, width, stride=1, *, last=True):
        """Maps `taken` channels to `width`."""
        layers = [nn.Conv2d(taken, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)]
        super().__init__(*layers, *([nn.ReLU()] if last else []))


class Residual(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, taken, width, stride):
        """Maps `taken` channels to `width`."""
        super().__init__()
        self.more = nn.Sequential(
            Convolution(taken, width, stride), Convolution(width, width, last=False)
        )
        same = taken == width and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(taken, width, 1, stride, bias=False)

    def forward(self, hidden):
        """Returns the sum of both branches, after ReLU."""
        return F.relu(self.short(hidden) + self.more(hidden))


class Block(nn.Module):
    """A transformer block: causal self-attention and a perceptron, each with a residual
    connection.
    """

    def __init__(self, width):
        """Creates layers of `width` features."""
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden):
        """Takes and returns (batch, positions, width)."""
        normed, (count, places, width) = self.first(hidden), hidden.shape
        heads = [
            each(normed).view(count, places, HEADS, width // HEADS).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(count, places, width))
        return hidden + self.narrow(F.relu(self.wide(self.second(hidden))))


class Transformer(nn.Module):
    """A causal language model of bytes."""

    def __init__(self, words, window, width):
        """Creates a model for windows of `window` positions."""
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(window, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, text):
        """Takes (batch, positions), returns (batch, words, positions), as the loss expects."""
        hidden = self.words(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return self.logits(self.norm(self.blocks(hidden))).transpose(1, 2)


def build(model, words, window, width):
    """Returns the model with this name."""
    if model == "mlp":
        hidden = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(512, 10))
    if model == "transformer":
        return Transformer(words, window, width)
    parts, taken = [Convolution(3, 32)], 32
    if model == "cnn":
        for channels in (32, 64, 128):
            parts += [Convolution(taken, channels), nn.MaxPool2d(2)]
            taken = channels
    else:
        for channels in (32, 64, 128):
            for block in range(3):
                parts.append(Residual(taken, channels, 2 if block == 0 and channels > 32 else 1))
                taken = channels
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(taken, 10))


def steps_of(network, batch, dtype, device="cpu"):
    """Returns a function that runs a number of eager steps.

    Args:
        network: takes the inputs, returns logits.
        batch: (inputs, labels), NumPy arrays; images have channels last.
        dtype: "float32", "bfloat16" or "float16".
        device: "cpu" or "cuda"; the network is there.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    inputs, labels = (torch.from_numpy(each.copy()).to(device) for each in batch)
    if inputs.ndim == 4:
        # PyTorch's layout, with the memory format in which its convolutions are fastest.
        inputs = inputs.permute(0, 3, 1, 2).to(memory_format=torch.channels_last)
        network = network.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters(), 1e-4)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")

    def take(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32"):
                loss = F.cross_entropy(network(inputs), labels.long())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        loss.item()

    return take
