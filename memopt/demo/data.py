"""Handwritten digits: scikit-learn's `load_digits`, enlarged to 28x28."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64
IMAGE_SIZE = (28, 28)
BRIGHTEST = 16.0  # load_digits counts the inked pixels of 4x4 blocks


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 28, 28) in [0, 1] and their labels (N,), to learn from and held out."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def to(self, device: torch.device) -> Digits:
        return Digits(*(getattr(self, f.name).to(device) for f in fields(self)))

    def batches(self, seed: int) -> DataLoader[tuple[Tensor, ...]]:
        """The images to learn from in batches of 64, in an order that `seed` fixes."""
        return DataLoader(
            TensorDataset(self.train_images, self.train_labels),
            batch_size=BATCH,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed),
        )


def load_digits() -> Digits:
    """All 1,797 digits; a fifth of each class is held out, always the same images."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    pixels, labels = datasets.load_digits(return_X_y=True)
    small = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / BRIGHTEST
    images = F.interpolate(small, size=IMAGE_SIZE, mode="bilinear", align_corners=False)
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    targets = torch.from_numpy(labels).long()
    return Digits(images[train], targets[train], images[test], targets[test])
