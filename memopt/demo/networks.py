"""The three networks of the demo, each made of stock layers and of memopt layers.

Both builds of a network have the same parameters under the same names, so that either loads the
other's state_dict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt

CLASSES = 10

#: (classifier, features, labels) -> loss
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """What a network is made of and how it learns.

    Attributes:
        name: what the command line calls it.
        channels: of its two 5x5 convolutions, each with ReLU and max-pooling by 2.
        hidden: width of the layer between the convolutions and the classes.
        pool_first: max-pooling comes before ReLU, which is the same function.
        stock_loss, memopt_loss: the last layer and the loss.
        log_softmax: the last layer ends in a log-softmax.
        optimizer: makes the optimizer of some parameters.
        epochs: passes over the data, enough for 95 % with room to spare.
    """

    name: str
    channels: tuple[int, int]
    hidden: int
    pool_first: bool
    stock_loss: Loss
    memopt_loss: Loss
    log_softmax: bool
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    epochs: int


class Network(nn.Module):
    """Layers that make features of an image, a last linear layer, and the loss to train it with."""

    def __init__(self, features: nn.Sequential, classifier: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier
        self._loss = loss

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return self._loss(self.classifier, self.features(images), labels)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes: logits, or their log-softmax, which ranks them alike."""
        return self.classifier(self.features(images))


# -- The two builds --------------------------------------------------------------------------------


def stock(recipe: Recipe) -> Network:
    """The network made of `torch.nn` layers."""
    first, second = recipe.channels

    def stage(i: int, conv: nn.Module) -> list[tuple[str, nn.Module]]:
        relu, pool = (f"relu{i}", nn.ReLU()), (f"pool{i}", nn.MaxPool2d(2))
        return [(f"conv{i}", conv), *((pool, relu) if recipe.pool_first else (relu, pool))]

    features = [
        *stage(1, nn.Conv2d(1, first, 5)),
        *stage(2, nn.Conv2d(first, second, 5)),
        ("flatten", nn.Flatten()),
        ("linear", nn.Linear(16 * second, recipe.hidden)),
        ("relu", nn.ReLU()),
    ]
    classifier = nn.Linear(recipe.hidden, CLASSES)
    return Network(nn.Sequential(OrderedDict(features)), classifier, recipe.stock_loss)


def with_memopt(recipe: Recipe, storage: str = "keep") -> Network:
    """The same network made of `memopt.nn` layers.

    Args:
        recipe: the network.
        storage: how `memopt.nn.Linear` keeps its input for backward; "keep" is exact.
    """
    first, second = recipe.channels
    features = [
        ("conv1", memopt.nn.ConvReLUPool2d(1, first, 5)),  # ReLU and pooling, in either order
        ("conv2", memopt.nn.ConvReLUPool2d(first, second, 5)),
        ("flatten", nn.Flatten()),
        ("linear", memopt.nn.Linear(16 * second, recipe.hidden, storage=storage)),
        ("relu", memopt.nn.ReLU()),
    ]
    last = memopt.nn.LinearLogSoftmax if recipe.log_softmax else nn.Linear
    classifier = last(recipe.hidden, CLASSES)
    return Network(nn.Sequential(OrderedDict(features)), classifier, recipe.memopt_loss)


def stages(features: nn.Sequential) -> Iterator[tuple[nn.Sequential, bool]]:
    """The features in order, every convolution together with the ReLU and pooling that follow it.

    Yields:
        Layers, and whether they are such a convolution's.
    """
    stage: list[nn.Module] = []
    for layer in features:
        belongs = isinstance(layer, (nn.ReLU, nn.MaxPool2d)) and len(stage) > 0
        if stage and not (belongs and isinstance(stage[0], nn.Conv2d)):
            yield nn.Sequential(*stage), isinstance(stage[0], nn.Conv2d)
            stage = []
        stage.append(layer)
    yield nn.Sequential(*stage), isinstance(stage[0], nn.Conv2d)


# -- The three networks ----------------------------------------------------------------------------


def _linear_cross_entropy(classifier: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    return memopt.nn.functional.linear_cross_entropy(
        features, classifier.weight, labels, linear_bias=classifier.bias
    )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="simple",
            channels=(20, 50),
            hidden=500,
            pool_first=False,
            stock_loss=lambda last, x, y: F.nll_loss(F.log_softmax(last(x), dim=1), y),
            memopt_loss=lambda last, x, y: F.nll_loss(last(x), y),
            log_softmax=True,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
            epochs=12,
        ),
        Recipe(
            name="cross-entropy",
            channels=(10, 20),
            hidden=50,
            pool_first=False,
            stock_loss=lambda last, x, y: F.cross_entropy(last(x), y),
            memopt_loss=_linear_cross_entropy,
            log_softmax=False,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
            epochs=25,
        ),
        Recipe(
            name="pool-first",
            channels=(10, 20),
            hidden=50,
            pool_first=True,
            stock_loss=lambda last, x, y: F.cross_entropy(F.log_softmax(last(x), dim=1), y),
            memopt_loss=lambda last, x, y: F.cross_entropy(last(x), y),
            log_softmax=True,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.001),
            epochs=25,
        ),
    )
}
