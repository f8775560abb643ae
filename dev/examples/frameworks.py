#!/usr/bin/env python3
"""frameworks.py — the same training in a plain loop, and by the frameworks that bring a loop of their own.

    pip install torch ./lossynet/python transformers accelerate lightning
    torchrun --nproc-per-node 2 dev/examples/frameworks.py plain|trainer|accelerate|lightning

As soon as torchrun's variables are there, these frameworks put DistributedDataParallel around the model. So
Place.take() hands the variables to lossynet alone, before they are imported: each then sees one process. Each
rank gives its framework a part of the data of its own.
"""
import argparse
import pathlib
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
# pylint: disable=wrong-import-position
from python_packages import refuse, require

if __name__ == "__main__":
    require("torch", "lossynet")
import lossynet.torch

PLACE = lossynet.Place.take()  # lossynet: before the frameworks are imported

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, Subset  # noqa: E402

EPOCHS = 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))

    def forward(self, x, y):
        return {"loss": ((self.layers(x) - y) ** 2).mean()}


def data():
    """This rank's part. DistributedSampler is told the place, since there is no process group."""
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(5))
    whole = [{"x": row, "y": (2 * row[:5]).sin()} for row in x]
    sampler = DistributedSampler(whole, num_replicas=PLACE.ranks, rank=PLACE.rank, shuffle=False)
    return Subset(whole, list(sampler))


def optimizer_of(model):
    return lossynet.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.5, momentum=0.9, **PLACE._asdict())


def plain(model):
    optimizer = optimizer_of(model)
    for _ in range(EPOCHS):
        for batch in DataLoader(data(), 8):
            model(**batch)["loss"].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def trainer(model):
    """transformers.Trainer: optimizers=, and a folder for each rank, which saves as if it were alone."""
    import transformers
    optimizer = optimizer_of(model)
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(), num_train_epochs=EPOCHS, per_device_train_batch_size=8, max_grad_norm=0.1, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    transformers.Trainer(model, arguments, train_dataset=data(), optimizers=(optimizer, schedule)).train()
    return optimizer


def accelerate(model):
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    optimizer = optimizer_of(model)
    model, prepared, loader = accelerator.prepare(model, optimizer, DataLoader(data(), 8))
    for _ in range(EPOCHS):
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            prepared.step()
            prepared.zero_grad()
    return optimizer


def lightning(model):
    """Lightning: devices=1, so that its strategy is that of one device."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _number):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            self.sharded = optimizer_of(self.model)
            return self.sharded

    module = Module()
    L.Trainer(accelerator="cpu", devices=1, max_epochs=EPOCHS, gradient_clip_val=0.1, logger=False,
              enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
              default_root_dir=tempfile.mkdtemp()).fit(module, DataLoader(data(), 8))
    return module.sharded


def main():
    by_name = {"plain": plain, "trainer": trainer, "accelerate": accelerate, "lightning": lightning}
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=by_name)
    framework = by_name[parser.parse_args().framework]
    model = Model()
    try:
        optimizer = framework(model)
    except ModuleNotFoundError as missing:
        refuse([missing.name])
    with optimizer.model():
        norm = nn.utils.parameters_to_vector(model.parameters()).double().norm().item()
    print(f"rank {PLACE.rank}: {optimizer.steps} steps, norm of the parameters {norm:.6f}", flush=True)
    optimizer.close()


if __name__ == "__main__":
    main()
