"""The training loop: one for every objective, one or many processes. All randomness of a step is
seeded by (seed, step), so a checkpoint holds no generator state and a run that was killed continues
exactly as if it had not been."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdbd import networks as models
from fdbd.core.configuration import one_of, positive
from fdbd.data import datasets
from fdbd.data.datasets import Images
from fdbd.networks.architectures import CompactResNet, whiten_stem
from fdbd.networks.checkpoint import load_plain
from fdbd.train.data import labelled_images, normalise, read
from fdbd.train.distributed import mean_over_processes, process_group, rows_of, world
from fdbd.train.objectives import OBJECTIVES, Contrastive, Objective, fit_linear, head_of, set_head
from fdbd.train.optimisers import OPTIMISERS, optimiser_of
from fdbd.train.presets import Preset, preset
from fdbd.util.devices import choose_device
from fdbd.util.files import beside
from fdbd.util.progress import Bar, track

Row = dict[str, float]
LOGS = ("csv", "tensorboard", "none")


@dataclass
class Trained:
    """The result of a training: the model (in evaluation mode), one row per epoch, and the test
    accuracy as a fraction."""

    model: nn.Module
    history: list[Row]
    test_accuracy: float | None
    config: Preset
    path: Path | None


def train(
    recipe: str | Preset,
    data: Any = None,
    test: Any = None,
    out: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = "auto",
    log: str = "csv",
    progress: bool = True,
    resume: bool = True,
    checkpoint_steps: int = 0,
    max_steps: int = 0,
    **overrides: Any,
) -> Trained:
    """Train a classifier by a preset's recipe. Under `torchrun` the processes share each batch. A
    GPU runs it under `torch.compile`, and in bfloat16 if it can.

    Args:
        recipe: a preset, or the name of one.
        data: uint8 images (N, H, W, 3) with labels (N,), as a pair of arrays or tensors, as
            `fdbd.data.datasets.Images`, or as a dataset of single (image, label), which is read
            into memory; None: the preset's dataset.
        test: images and labels to test on, as for `data`; None: the test images of the preset's
            dataset if `data` is None, too, else none.
        out: a folder for ``checkpoint.pt``, the log and ``model.safetensors``; None: nothing is
            written.
        device: where to train, as for `choose_device`.
        log: "csv" for ``log.csv``, "tensorboard" or "none"; one row per epoch.
        progress: show a bar, and a line per epoch.
        resume: continue from the checkpoint in `out`, if there is one.
        checkpoint_steps: write a checkpoint every so many steps, not only at the end of each
            epoch; 0: at these alone.
        max_steps: stop after so many steps of the recipe, and fit the head and test on no more
            images than were trained on: a smoke run that takes every step of the way and gives a
            useless model. 0: the whole recipe.
        **overrides: fields of the preset to replace.
    """
    base = preset(recipe) if isinstance(recipe, str) else recipe
    config = base.override(**overrides)
    _check(config)
    one_of("log", log, *LOGS)
    if max_steps < 0:
        raise ValueError(f"max_steps is {max_steps}, expected 0 or a number of steps")
    train_set, test_set = _load_data(config, data, test)
    folder = None
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
    where = _own_device(device)
    # Training seeds torch's generators, and puts them back as they were.
    generators_on = [where] if where.type == "cuda" else []
    with process_group(where), torch.random.fork_rng(generators_on):
        show = progress and world()[0] == 0
        run = _Run(config, train_set, test_set, folder, where, show, max_steps)
        if resume:
            run.restore()
        # One process writes the log for all.
        log_folder = folder if run.rank == 0 else None
        run.fit(_Log(log, log_folder), checkpoint_steps)
        return run.finish()


def _load_data(config: Preset, data: Any, test: Any) -> tuple[Images, Images | None]:
    """The training images, and the test images if there are any."""
    if data is None:
        data = datasets.load(config.dataset, "train")
        if test is None:
            test = datasets.load(config.dataset, "test")
    train_set = labelled_images(data, config.num_classes, config.image_size)
    test_set = None
    if test is not None:
        test_set = labelled_images(test, config.num_classes, config.image_size)
    if config.batch_size > len(train_set):
        raise ValueError(
            f"a batch of {config.batch_size} is larger than the {len(train_set)} images given"
        )
    return train_set, test_set


def _own_device(device: str | torch.device | None) -> torch.device:
    where = choose_device(device)
    if where.type == "cuda" and where.index is None:  # pragma: no cover - GPU
        # Under torchrun each process has its own GPU.
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    return where


def _check(config: Preset) -> None:
    one_of("objective", config.objective, *OBJECTIVES)
    one_of("optimizer", config.optimizer, *OPTIMISERS)
    for name in ("epochs", "batch_size", "num_classes", "lr"):
        positive(name, getattr(config, name))
    if config.sizes and config.augment.area is None and not config.augment.pad:
        raise ValueError("sizes needs random crops: set the augmentation's pad or area")
    # An unknown schedule is an error now rather than at the first step.
    config.rate(0.5)
    if config.start:
        card = models.zoo_card(config.start)
        if card.model != config.model:
            raise ValueError(
                f"start is {config.start}, whose weights are those of a {card.model} and do not "
                f"fit a {config.model}"
            )


class _Log:
    """One row per epoch. The whole history is written as CSV each time, so a resumed run leaves no
    duplicate rows."""

    def __init__(self, kind: str, folder: Path | None) -> None:
        self.file: Path | None = None
        if folder is not None and kind == "csv":
            self.file = folder / "log.csv"
        self.board: Any = None
        if folder is not None and kind == "tensorboard":
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError(
                    "log='tensorboard' needs TensorBoard: pip install tensorboard"
                ) from error
            self.board = SummaryWriter(str(folder))

    def write(self, history: list[Row]) -> None:
        """Record a history whose last row is new."""
        if self.file is not None:
            with beside(self.file) as draft, open(draft, "w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(history[0]))
                writer.writeheader()
                writer.writerows(history)
        elif self.board is not None:
            for key, value in history[-1].items():
                self.board.add_scalar(key, value, int(history[-1]["epoch"]))
            self.board.flush()


def _seed(seed: int, stream: int, index: int) -> int:
    """One number for one purpose at one step; distinct for all practical lengths of training."""
    return ((seed * 1_000_003 + stream) * 1_000_000_007 + index) % 2**63


class _Run:
    """One training: the modules, the optimiser, and the state of its progress."""

    def __init__(
        self,
        config: Preset,
        data: Images,
        test: Images | None,
        folder: Path | None,
        device: torch.device,
        show: bool,
        max_steps: int = 0,
    ) -> None:
        self.config = config
        self.data = data
        self.test = test
        self.folder = folder
        self.checkpoint = None if folder is None else folder / "checkpoint.pt"
        self.device = device
        self.show = show
        self.rank, self.processes = world()
        self.rows = rows_of(self.rank, self.processes, config.batch_size)
        self.labels = torch.as_tensor(data.labels)
        self.epoch_steps = len(data) // config.batch_size
        self.total = self.epoch_steps * config.epochs
        self.last = min(self.total, max_steps) if max_steps else self.total
        # The most images that the head is fitted and tested on: all, except in a smoke run.
        self.image_limit = max_steps * config.batch_size if max_steps else None

        # How far the training is.
        self.step = 0
        # The random order of the images in epoch `ordered_epoch`.
        self.order = torch.empty(0)
        self.ordered_epoch = -1
        # Loss and accuracy, summed over this epoch's steps.
        self.sums = torch.zeros(2)
        self.seconds = 0.0
        self.history: list[Row] = []
        # A contrastive objective trains without a head, which is fitted at the end.
        self.has_head = False

        torch.manual_seed(config.seed)
        model = self._new_model()
        self.head_name, _ = head_of(model)
        self.objective = self._new_objective(model)
        self.model = self.objective.model
        self.optimizer = optimiser_of(config, self.objective)
        # The weights that are evaluated and kept: their average, if the recipe has one.
        self.kept = self.model
        if config.ema:
            self.kept = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.mixed = device.type == "cuda" and torch.cuda.is_bf16_supported()
        self.forward = self._forward()

    def _new_model(self) -> nn.Module:
        """The recipe's network with the weights that training starts from."""
        config = self.config
        model = models.create(config.model, num_classes=config.num_classes)
        if config.whiten:
            if not isinstance(model, CompactResNet):
                raise ValueError(
                    f"whiten is for the network resnet10_compact, not for {config.model}"
                )
            first_rows = torch.arange(min(5000, len(self.data)))
            first_images = read(self.data, first_rows, torch.device("cpu"))
            whiten_stem(model, normalise(first_images, config.mean, config.std))
        if config.start:
            model.load_state_dict(models.zoo(config.start).state_dict())
        _, head = head_of(model)
        if head.out_features != config.num_classes:
            raise ValueError(
                f"{config.model} has {head.out_features} outputs, expected one for each of the "
                f"recipe's {config.num_classes} classes"
            )
        if self.device.type == "cuda" and self.processes > 1:  # pragma: no cover - GPU
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return model

    def _new_objective(self, model: nn.Module) -> Objective:
        """What is trained: the network within the recipe's objective, on the device."""
        objective = OBJECTIVES[self.config.objective](model, self.config)
        wanted = objective.joined * self.processes
        if self.config.batch_size % wanted:
            raise ValueError(
                f"batch_size is {self.config.batch_size}, expected a multiple of {wanted}: each "
                f"{objective.joined} images of a process become one picture"
            )
        return objective.to(self.device).to(memory_format=torch.channels_last)

    def _forward(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The objective as it is called: joined over processes, and compiled on a GPU."""
        forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = self.objective
        if self.processes > 1:
            devices = [self.device.index] if self.device.type == "cuda" else None
            forward = nn.parallel.DistributedDataParallel(self.objective, devices)
        if self.device.type == "cuda":  # pragma: no cover - GPU
            forward = torch.compile(forward)
        return forward

    def batch(self) -> tuple[Tensor, Tensor]:
        """This process's part of the next joint batch: `views` copies of its images, normalised,
        and the labels."""
        config = self.config
        chosen = self._next_rows()
        images = read(self.data, chosen, self.device)
        size = None
        if config.sizes:
            phase = self.step * len(config.sizes) // self.total
            size = config.sizes[phase]
        generator = torch.Generator().manual_seed(_seed(config.seed, 2, self.step))
        views = []
        for _ in range(self.objective.views):
            draws = config.augment.draw(config.batch_size, generator)
            mine = {key: value[self.rows] for key, value in draws.items()}
            views.append(config.augment.apply(images, mine, size))
        batch = normalise(torch.cat(views), config.mean, config.std)
        labels = self.labels[chosen].to(self.device)
        return batch.contiguous(memory_format=torch.channels_last), labels

    def _next_rows(self) -> Tensor:
        """Which images are this process's part of the next joint batch. Each epoch has a random
        order of its own, the same in all processes."""
        config = self.config
        epoch, place = divmod(self.step, self.epoch_steps)
        if epoch != self.ordered_epoch:
            shuffle = torch.Generator().manual_seed(_seed(config.seed, 1, epoch))
            self.order = torch.randperm(len(self.data), generator=shuffle)
            self.ordered_epoch = epoch
        joint = self.order[place * config.batch_size : (place + 1) * config.batch_size]
        return joint[self.rows]

    def advance(self) -> None:
        """One optimiser step."""
        images, labels = self.batch()
        config = self.config
        rate = config.rate((self.step + 0.5) / self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # For dropout and the like.
        torch.manual_seed(_seed(config.seed, 3 + self.rank, self.step))
        self.objective.train()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed):
            loss, accuracy = self.forward(images, labels)
        if not bool(torch.isfinite(loss)):
            raise RuntimeError(
                f"the loss is {float(loss.detach())} at step {self.step}: lower lr ({rate:.3g} now)"
            )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        if self.kept is not self.model:
            self.update_average()
        self.sums += mean_over_processes(torch.stack([loss.detach(), accuracy])).cpu()

    @torch.no_grad()
    def update_average(self) -> None:
        """kept ← d·kept + (1 − d)·model, d growing to the recipe's `ema` so that the start is
        forgotten quickly."""
        weight = 1 - min(self.config.ema, (1 + self.step) / (10 + self.step))
        new = self.model.state_dict()
        for key, average in self.kept.state_dict().items():
            if average.is_floating_point():
                average.lerp_(new[key], weight)
            else:
                # A norm's count of batches.
                average.copy_(new[key])

    def fit(self, log: _Log, checkpoint_steps: int) -> None:
        """Train from the current step to the end."""
        with Bar(self.config.name, self.last, self.show) as bar:
            while self.step < self.last:
                started = time.perf_counter()
                self.advance()
                self.seconds += time.perf_counter() - started
                place = self.step % self.epoch_steps
                # At the end of an epoch, its sums are still those of all its steps.
                num_summed = self.epoch_steps if place == 0 else place
                loss, accuracy = (self.sums / num_summed).tolist()
                bar.description = f"{self.config.name}  loss {loss:.3f}  accuracy {accuracy:.1%}"
                bar.update(self.step)
                # The last step of a smoke run ends its epoch early.
                ends_epoch = place == 0 or self.step == self.last
                if ends_epoch:
                    epoch = math.ceil(self.step / self.epoch_steps)
                    self.end_epoch({"epoch": epoch, "loss": loss, "accuracy": accuracy})
                    log.write(self.history)
                if ends_epoch or (checkpoint_steps and self.step % checkpoint_steps == 0):
                    self.save()

    def end_epoch(self, row: Row) -> None:
        if self.test is not None:
            row["test_accuracy"] = self.evaluate()
        row |= {"lr": self.optimizer.param_groups[0]["lr"], "seconds": round(self.seconds, 3)}
        self.history.append(row)
        self.sums.zero_()
        self.seconds = 0.0
        if self.show:
            test = f"  test {row['test_accuracy']:.2%}" if "test_accuracy" in row else ""
            means = f"loss {row['loss']:.4f}  accuracy {row['accuracy']:.2%}{test}"
            print(
                f"epoch {row['epoch']}  {means}  lr {row['lr']:.4f}  {row['seconds']:.0f} s",
                flush=True,
            )

    @torch.no_grad()
    def outputs(
        self, images: Images, count: int | None = None, flip: bool = False, show: bool = False
    ) -> Tensor:
        """The kept model's outputs for the first `count` images, or for all: (N, …) on the CPU in
        float32; one row for each picture that the objective makes of them."""
        model = self.kept.eval()
        taken = len(images)
        for limit in (count, self.image_limit):
            if limit is not None:
                taken = min(taken, limit)
        taken -= taken % self.objective.joined
        out = []
        for part in track(torch.arange(taken).split(500), "features for the head", enabled=show):
            batch = normalise(read(images, part, self.device), self.config.mean, self.config.std)
            if flip:
                batch = batch.flip(3)
            out.append(model(self.objective.pictures(batch)).float().cpu())
        return torch.cat(out)

    def evaluate(self) -> float:
        """The test accuracy, a fraction. Before a contrastive objective has a head, it is that of
        the nearest class mean of 5,000 training images."""
        assert self.test is not None
        out = self.outputs(self.test)
        classes = self.config.num_classes
        if isinstance(self.objective, Contrastive) and not self.has_head:
            known = F.normalize(self.outputs(self.data, 5000), dim=1)
            labels = self.labels[: len(known)]
            means = torch.stack([known[labels == c].mean(dim=0) for c in range(classes)])
            # A class without samples has no mean.
            out = out @ F.normalize(means.nan_to_num(), dim=1).T
        # In a smoke run there are outputs for a part of the test images alone.
        num_images = len(out) * self.objective.joined
        truth = torch.as_tensor(self.test.labels)[:num_images]
        return float(self.objective.share_right(out, truth).mean())

    def finish(self) -> Trained:
        """Fit the head if the objective trains without one, test the model, and write it."""
        model = self.kept
        config = self.config
        if isinstance(self.objective, Contrastive):
            self._fit_head(model)
        accuracy = None if self.test is None else self.evaluate()
        path = None if self.folder is None else self.folder / "model.safetensors"
        if path is not None and self.rank == 0:
            models.save_weights(model, path, metadata=self._about_model(accuracy))
        return Trained(model.eval(), self.history, accuracy, config, path)

    def _fit_head(self, model: nn.Module) -> None:
        """Put a linear head on the frozen features, of the images and perhaps of their mirror
        images."""
        config = self.config
        flips = (False, True) if config.linear_flip else (False,)
        features = [self.outputs(self.data, flip=flip, show=self.show) for flip in flips]
        labels = self.labels[: len(features[0])].repeat(len(flips))
        head = fit_linear(torch.cat(features), labels, config, _seed(config.seed, 0, 0))
        set_head(model, self.head_name, head.to(self.device))
        self.has_head = True

    def _about_model(self, accuracy: float | None) -> dict[str, str]:
        """The metadata of the weights file: texts as they are, all else as JSON."""
        config = self.config
        about = {
            "model": config.model,
            "num_classes": config.num_classes,
            "dataset": config.dataset,
            "seed": config.seed,
            "mean": config.mean,
            "std": config.std,
            "recipe": config.name,
            "test_accuracy": accuracy,
        }
        if self.last < self.total:
            about["stopped_after_steps"] = self.last
        said = {}
        for key, value in about.items():
            said[key] = value if isinstance(value, str) else json.dumps(value)
        return said

    def _parts(self) -> dict[str, Any]:
        """The parts of the run that a checkpoint holds the state of."""
        parts: dict[str, Any] = {"objective": self.objective, "optimizer": self.optimizer}
        if self.kept is not self.model:
            parts["average"] = self.kept
        return parts

    def save(self) -> None:
        """Write the state of the training to a checkpoint: tensors and plain values only."""
        if self.checkpoint is None or self.rank != 0:
            return
        state = {name: part.state_dict() for name, part in self._parts().items()}
        state |= {"config": _describe(self.config), "images": len(self.data)}
        state["step"] = self.step
        state["sums"] = self.sums
        state["seconds"] = self.seconds
        state["history"] = self.history
        with beside(self.checkpoint) as draft:
            # torch's own writer calls a full disk a RuntimeError.
            buffer = io.BytesIO()
            torch.save(state, buffer)
            draft.write_bytes(buffer.getbuffer())

    def restore(self) -> None:
        """Go on from the checkpoint, if there is one. A checkpoint of another recipe is an error
        that names the difference."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        state: dict[str, Any] = load_plain(self.checkpoint)
        old = _with_defaults(json.loads(state["config"]))
        new = json.loads(_describe(self.config))
        changed = []
        for key in new:
            if old[key] != new[key]:
                changed.append(f"{key} was {old[key]!r}, is {new[key]!r}")
        if state["images"] != len(self.data):
            changed.append(f"images were {state['images']}, are {len(self.data)}")
        if changed:
            raise ValueError(
                f"{self.checkpoint} belongs to another training ({'; '.join(changed)}): choose "
                "another folder"
            )
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.step = state["step"]
        self.sums = state["sums"]
        self.seconds = state["seconds"]
        self.history = state["history"]


def _describe(config: Preset) -> str:
    """The recipe's numbers as JSON; its prose may change without being another recipe."""
    values = asdict(config)
    del values["name"], values["summary"]
    return json.dumps(values)


def _with_defaults(described: dict[str, Any]) -> dict[str, Any]:
    """A recipe as a checkpoint describes it. A field that the file does not know came later: it had
    its default then."""
    defaults = json.loads(_describe(Preset("", "")))
    augment = {**defaults["augment"], **described.get("augment", {})}
    return {**defaults, **described, "augment": augment}
