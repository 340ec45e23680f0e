"""Networks of Hugging Face's `transformers` from a local folder; each client has adapters of its own on the attention.

    pip install transformers
    python examples/pretrained.py examples/vit
    pflmpi run examples/pretrained.yaml --out runs/pretrained

The second command stands for a network that was trained before: it writes a small one with random weights. Any folder
that `save_pretrained` wrote does as well, also of text: `name: ./pretrained.py:Texts`, for samples of tokens.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

from pflmpi.models.lora import lora

logging.set_verbosity_error()  # that the classifier is made anew is meant
logging.disable_progress_bar()


class Images(nn.Module):
    """Scores of images of the size and the channels that FOLDER/config.json states; FOLDER is beside this file."""

    kind = AutoModelForImageClassification
    adapted = ("*.q_proj", "*.v_proj")  # as `named_modules()` has them, which may be others than in the weights' file

    def __init__(self, num_classes: int, folder: str, rank: int = 2):
        super().__init__()
        self.network = self.kind.from_pretrained(
            Path(__file__).parent / folder,
            num_labels=num_classes,
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            attn_implementation="eager",  # the one that lanes compute in one call
            attention_probs_dropout_prob=0.0,  # its masks would not follow from the seed; nn.Dropout stays
        )
        lora(self, self.adapted, rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).logits


class Texts(Images):
    """Scores of texts, which are tokens [B, T]."""

    kind = AutoModelForSequenceClassification
    adapted = ("*.query", "*.value")

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.long()).logits


def write(folder: Path) -> None:
    """A small vision transformer for digits, with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, **sizes)).save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
