"""Trains the builds of a network side by side, and measures what they hold and their speed."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from memopt._measure import peak_bytes, saved_bytes
from memopt.demo import networks
from memopt.demo.data import BATCH, Digits
from memopt.demo.networks import Network, Recipe
from memopt.demo.rounding import STRETCH, Drift

#: Steps that are not timed: the first ones allocate and compile.
WARM_UP = 5

#: The scale of fp16 losses. torch's default of 65536 overflows here, and the first steps are then
#: skipped in one build and not in another.
LOSS_SCALE = 1024.0


@dataclass(frozen=True)
class Options:
    """How to train.

    Attributes:
        device: where.
        amp: the dtype of `torch.autocast`, or None for float32 throughout.
        storage: how memopt.nn.Linear keeps its input; all but "keep" are inexact.
        seed: of the initial weights and of the order of the images.
        epochs: passes over the data; None leaves it to each network.
    """

    device: torch.device
    amp: torch.dtype | None = None
    storage: str = "keep"
    seed: int = 0
    epochs: int | None = None

    @property
    def exact(self) -> bool:
        """Whether memopt's layers compute what the stock layers do."""
        return self.storage == "keep"


@dataclass
class Measured:
    """One build of a network, trained.

    Attributes:
        losses: of every step, before its update.
        accuracy: on the held-out digits, 0 to 1.
        seconds: a step takes (median).
        saved: bytes kept for backward in a step, parameters aside, which are kept anyway.
        saved_by_convs: the same for the convolutions with their ReLU and pooling, each run alone:
            all bytes, also the input's and the weights', and what two layers share twice.
        saved_beyond: of those, what is neither the input's nor the weights'.
        peak: the most bytes that a step holds at once, beyond what it found.
    """

    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    seconds: float = 0.0
    saved: int = 0
    saved_by_convs: int = 0
    saved_beyond: int = 0
    peak: int = 0


@dataclass
class Trained:
    """What came of one network. `drift` is None where memopt's layers are not exact."""

    recipe: Recipe
    stock: Measured
    memopt: Measured
    precise_losses: list[float]
    drift: Drift | None


class Learner:
    """A network while it learns."""

    def __init__(self, network: Network, recipe: Recipe, amp: torch.dtype | None = None) -> None:
        self.network = network
        self.parameter = next(network.parameters())
        self.optimizer = recipe.optimizer(network.parameters())
        self.amp = amp
        self.scaler = torch.amp.GradScaler(
            self.parameter.device.type, init_scale=LOSS_SCALE, enabled=amp == torch.float16
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        images = images.to(self.parameter.dtype)
        with torch.autocast(images.device.type, self.amp, enabled=self.amp is not None):
            return self.network.loss(images, labels)

    def update(self, images: Tensor, labels: Tensor) -> Tensor:
        """One step of training; returns the loss before it."""
        self.optimizer.zero_grad()
        loss = self.loss(images, labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One step of training, timed and recorded."""
        synchronize(images.device)
        start = time.perf_counter()
        loss = self.update(images, labels)
        synchronize(images.device)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def copy_state(self, other: Learner) -> None:
        """Go on from where `other` is."""
        self.network.load_state_dict(other.network.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.scaler.load_state_dict(other.scaler.state_dict())

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        with torch.autocast(images.device.type, self.amp, enabled=self.amp is not None):
            return (self.network(images).argmax(1) == labels).double().mean().item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- Training --------------------------------------------------------------------------------------


def epochs_of(recipe: Recipe, options: Options) -> int:
    return recipe.epochs if options.epochs is None else options.epochs


def train(
    recipe: Recipe,
    digits: Digits,
    options: Options,
    progress: Callable[[float, float], object] = lambda stock, memopt: None,
) -> Trained:
    """Train one network in every build, from the same weights and on the same batches.

    Args:
        recipe: the network.
        digits: on the options' device.
        options: how.
        progress: called after every step with the two losses.
    """
    amp = options.amp
    precise = torch.float64 if amp is None else torch.float32
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        initial = networks.stock(recipe).state_dict()

        def learner(network: Network, amp: torch.dtype | None = None) -> Learner:
            network.load_state_dict(initial)
            return Learner(network.to(options.device), recipe, amp)

        stock = learner(networks.stock(recipe), amp)
        ours = learner(networks.with_memopt(recipe, options.storage), amp)
        exact = learner(networks.stock(recipe).to(precise))
        # These two take over the stock network's state again and again.
        ours_near = learner(networks.with_memopt(recipe, options.storage), amp)
        exact_near = learner(networks.stock(recipe).to(precise))
        near = (ours_near, exact_near) if options.exact else ()

        batches = digits.batches(options.seed)
        taken = 0
        for _ in range(epochs_of(recipe, options)):
            for images, labels in batches:
                if taken % STRETCH == 0:
                    for follower in near:
                        follower.copy_state(stock)
                # Both go first equally often: whoever does finds colder caches.
                pair = (stock, ours) if taken % 2 == 0 else (ours, stock)
                for one in (*pair, exact, *near):
                    one.step(images, labels)
                taken += 1
                progress(stock.losses[-1], ours.losses[-1])
        drift = Drift.between(stock.losses, ours_near.losses, exact_near.losses) if near else None
        # Copies, as a DataLoader makes them: a slice's storage would be the whole data set's.
        batch = (digits.train_images[:BATCH].clone(), digits.train_labels[:BATCH].clone())
        return Trained(
            recipe,
            stock=measure(stock, digits, batch),
            memopt=measure(ours, digits, batch),
            precise_losses=exact.losses,
            drift=drift,
        )


# -- Measuring -------------------------------------------------------------------------------------


def measure(learner: Learner, digits: Digits, batch: tuple[Tensor, Tensor]) -> Measured:
    """Everything the demo shows of a build that has learnt. Takes one more step of training."""
    network = learner.network
    accuracy = learner.accuracy(digits.test_images, digits.test_labels)
    saved = saved_bytes(lambda: learner.loss(*batch), ignore=network.parameters())
    by_convs, beyond = convolutions(network, batch[0], learner.amp)
    learner.optimizer.zero_grad()
    return Measured(
        losses=learner.losses,
        accuracy=accuracy,
        seconds=statistics.median(learner.seconds[WARM_UP:] or learner.seconds),
        saved=saved,
        saved_by_convs=by_convs,
        saved_beyond=beyond,
        peak=peak_bytes(lambda: learner.update(*batch), batch[0].device),
    )


def convolutions(network: Network, images: Tensor, amp: torch.dtype | None) -> tuple[int, int]:
    """Bytes that convolutions, ReLU and pooling keep for backward: all, and beyond x and W.

    Each is run alone on what reaches it in the network. Under autocast its input and weights are
    cast before, so that the casts count as the input and the weights that they are.
    """
    everything = beyond = 0
    x = images.to(amp) if amp else images
    features = copy.deepcopy(network.features)
    for stage, is_convolution in networks.stages(features.to(x.dtype)):
        if is_convolution:
            parameters = list(stage.parameters())
            everything += saved_bytes(lambda: stage(x))  # noqa: B023 - called at once
            beyond += saved_bytes(lambda: stage(x), ignore=[x, *parameters])  # noqa: B023
        with torch.no_grad():
            x = stage(x)
        x = x.detach().requires_grad_()  # from the second layer on, backward goes through
        if isinstance(stage[0], nn.Flatten):
            break
    return everything, beyond
