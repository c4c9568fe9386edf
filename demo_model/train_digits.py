"""Train the model of handwritten digits, in minutes on two cores, and a classifier that judges its pictures.

    pip install diffusers scikit-learn
    python demo_model/train_digits.py demo_model/digits

The model is a UNet of diffusers that learns the 1,797 pictures of 8 x 8 pixels of scikit-learn (UCI's "Optical
Recognition of Handwritten Digits", CC BY 4.0), by denoising (Ho et al., 2020) with velocities (Salimans and Ho, 2022)
and labels left out at random for guidance (Ho and Salimans, 2022). Weights are stored as float16.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

SEED = 1797
NO_LABEL = 10
NUM_STEPS, BATCH, RATE = 1400, 64, 3e-3
DROPPED = 0.15  # labels
EMA = 0.99
Pictures = torch.Tensor  # float32 [n, 1, 8, 8] of -1 to 1


def read_digits() -> tuple[Pictures, torch.Tensor]:
    """Return all pictures and their labels [n], from scikit-learn's file, without its import."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("scikit-learn is not installed: pip install scikit-learn")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        table = torch.tensor(np.loadtxt(file, delimiter=","), dtype=torch.float32)
    return table[:, :64].reshape(-1, 1, 8, 8) / 8 - 1, table[:, 64].long()


def classifier() -> torch.nn.Sequential:
    """Return a network from pictures [n, 1, 8, 8] to logits [n, 10]."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10)
    )


def load_classifier(folder: Path) -> torch.nn.Sequential:
    model = classifier().eval()
    model.load_state_dict(load_file(folder / "classifier.safetensors"))
    return model


def train_classifier(pictures: Pictures, labels: torch.Tensor, folder: Path) -> float:
    """Train on five sixths of the digits. Return the part of the others that it recognises."""
    model, is_test = classifier(), torch.arange(len(labels)) % 6 == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for _ in range(600):
        noisy = pictures[~is_test] + 0.15 * torch.randn_like(pictures[~is_test])
        loss = torch.nn.functional.cross_entropy(model(noisy), labels[~is_test])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_file(model.state_dict(), folder / "classifier.safetensors")
    found = model.eval()(pictures[is_test]).argmax(dim=1)
    return float((found == labels[is_test]).float().mean())


def new_unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(24, 48),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=12, norm_num_groups=8, num_class_embeds=NO_LABEL + 1,
    )  # fmt: skip


def train_unet(pictures: Pictures, labels: torch.Tensor, scheduler: Any) -> Any:
    """Return a UNet with the mean of the last weights."""
    model, average = new_unet(), new_unet()
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, NUM_STEPS, pct_start=0.05)
    for step in range(NUM_STEPS):
        chosen = torch.randint(len(labels), (BATCH,))
        noise, times = torch.randn(BATCH, 1, 8, 8), torch.randint(1000, (BATCH,))
        given = torch.where(torch.rand(BATCH) < DROPPED, NO_LABEL, labels[chosen])
        noisy = scheduler.add_noise(pictures[chosen], noise, times)
        wanted = scheduler.get_velocity(pictures[chosen], noise, times)
        loss = torch.nn.functional.mse_loss(model(noisy, times, class_labels=given).sample, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1.0 - EMA)
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    return average


def main() -> None:
    from diffusers import DDIMPipeline, DDIMScheduler

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the model")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    pictures, labels = read_digits()
    print(f"classifier: {train_classifier(pictures, labels, folder):.1%} of digits that it has not seen")
    scheduler = DDIMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    model = train_unet(pictures, labels, scheduler).half()
    DDIMPipeline(model, scheduler).save_pretrained(folder)
    for path in folder.rglob("*.json"):  # without the folder's name and the library's version
        kept = {name: value for name, value in json.loads(path.read_text()).items() if name != "_name_or_path"}
        path.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
