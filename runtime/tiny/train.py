"""Trains the shipped model: ``python -m runtime.tiny.train --out DIR --minutes 30`` (about 30 minutes on one core).

Resumable: the state is written every couple of minutes and on SIGTERM or Ctrl-C; ``--resume`` goes on from it.
With ``--steps`` the schedule follows steps instead of the clock, and a resumed run equals an uninterrupted one bit
for bit. ``DIR/model`` is a Hugging Face folder (bf16) that is renewed with every state.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from eplane.errors import BadInput, TrainingRefused
from runtime.tiny.architecture import build_config, build_model
from runtime.tiny.corpus import batch, load_corpus, stream_digest, token_stream

STATE = "state.json"
EXIT_INTERRUPTED = 75
"""Stopped by a signal with its state saved (EX_TEMPFAIL): run again with --resume."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides what comes out. Stored with the state; a resumed run must name the same."""

    minutes: float = 30.0
    steps: int = 0
    """0: the clock ends the run, else this many steps."""
    rows: int = 8
    length: int = 512
    rate: float = 3e-3
    warmup: int = 60
    weight_decay: float = 0.05
    aux_loss: float = 0.001
    """Weight of each layer's load-balancing loss during the first half: all experts of a layer find use."""
    aux_loss_late: float = 0.0001
    """The same in the second half: experts specialise, and the skew that comes of it remains."""
    layers: int = 8
    experts: int = 32
    seed: int = 17


@dataclass(slots=True)
class Progress:
    step: int = 0
    seconds: float = 0.0


def layer_balance(router_logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """The load-balancing loss of one layer over the whole batch (Switch Transformers, 2021): top_k when even.

    Per layer, not over all layers at once as ``transformers`` has it: there one layer's idle experts are made up for
    by another layer's, so each layer may collapse. Over the batch, which mixes the domains, so that a domain may
    still prefer its own experts. ``router_logits`` [tokens, experts] -> scalar
    """
    probabilities = router_logits.float().softmax(dim=-1)
    chosen = probabilities.topk(top_k, dim=-1).indices
    experts = router_logits.shape[-1]
    share = torch.bincount(chosen.flatten(), minlength=experts) / len(router_logits)
    return experts * (share * probabilities.mean(dim=0)).sum()


class Trainer:
    def __init__(self, recipe: Recipe, streams: Mapping[str, NDArray[np.int16]], out: Path) -> None:
        self.recipe = recipe
        self.streams = streams
        self.digest = stream_digest(streams)
        self.out = out
        self.progress = Progress()
        config = build_config(aux_loss=recipe.aux_loss, layers=recipe.layers, experts=recipe.experts)
        self.model: Any = build_model(config, recipe.seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
        )

    def done_share(self) -> float:
        """How much of the run is behind us, 0 to 1."""
        if self.recipe.steps:
            return min(1.0, self.progress.step / self.recipe.steps)
        return min(1.0, self.progress.seconds / (60.0 * self.recipe.minutes))

    def rate(self) -> float:
        """Linear warm-up, then a cosine down to 2 % of the peak."""
        warm = min(1.0, (self.progress.step + 1) / self.recipe.warmup)
        cosine = 0.5 * (1.0 + math.cos(math.pi * self.done_share()))
        return self.recipe.rate * warm * (0.02 + 0.98 * cosine)

    def balance_weight(self) -> float:
        return self.recipe.aux_loss if self.done_share() < 0.5 else self.recipe.aux_loss_late

    def train_step(self) -> tuple[float, float]:
        """One optimiser step. Returns (cross entropy in nats a byte, mean over layers of their balance)."""
        started = time.monotonic()
        rows = torch.from_numpy(
            batch(self.streams, self.recipe.seed, self.progress.step, self.recipe.rows, self.recipe.length)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        with torch.autocast("cpu", torch.bfloat16):
            result = self.model(input_ids=rows, output_router_logits=True, use_cache=False)
        predicted = result.logits[:, :-1].float().flatten(0, 1)
        entropy = torch.nn.functional.cross_entropy(predicted, rows[:, 1:].flatten())
        balance = torch.stack(
            [layer_balance(logits, self.model.num_experts_per_tok) for logits in result.router_logits]
        )
        loss = float(entropy.detach())
        if not math.isfinite(loss):
            raise TrainingRefused(f"the loss is {loss} at step {self.progress.step}: lower --rate")
        total: Any = entropy + self.balance_weight() * balance.sum()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.seconds += time.monotonic() - started
        return loss, float(balance.detach().mean())

    def save(self) -> None:
        """State, then model. Every file is replaced whole; ``state.json`` comes last and names the tensors' file."""
        self.out.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": value.detach().contiguous() for name, value in self.model.named_parameters()}
        for name, value in self.model.named_parameters():
            for key, moment in self.optimizer.state.get(value, {}).items():
                tensors[f"adam.{name}.{key}"] = moment.contiguous()
        state_file = f"state-{self.progress.step}.safetensors"
        partial = self.out / "state.partial"
        save_file(tensors, partial)
        os.replace(partial, self.out / state_file)
        record = {
            "file": state_file,
            "step": self.progress.step,
            "seconds": self.progress.seconds,
            "recipe": asdict(self.recipe),
            "data": self.digest,
        }
        partial.write_text(json.dumps(record, indent=2) + "\n")
        os.replace(partial, self.out / STATE)
        for old in self.out.glob("state-*.safetensors"):
            if old.name != state_file:
                old.unlink()
        self.export(self.out / "model")

    def export(self, folder: Path) -> None:
        """The model as ``transformers`` stores it, in bf16; the training model itself stays in fp32."""
        copy: Any = build_model(self.model.config, self.recipe.seed)
        copy.load_state_dict(self.model.state_dict())
        partial = self.out / "model.partial"
        copy.to(torch.bfloat16).save_pretrained(partial)
        folder.mkdir(parents=True, exist_ok=True)
        for file in partial.iterdir():
            file.chmod(0o644)
            os.replace(file, folder / file.name)
        partial.rmdir()

    def load(self) -> None:
        try:
            record = json.loads((self.out / STATE).read_text())
            tensors = load_file(self.out / record["file"])
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise TrainingRefused(f"the state in {self.out} cannot be read: {error}") from error
        wanted = replace(self.recipe, minutes=0.0)
        if replace(Recipe(**record["recipe"]), minutes=0.0) != wanted:
            raise TrainingRefused(f"the state in {self.out} was made with another recipe: {record['recipe']}")
        if record["data"] != self.digest:
            raise TrainingRefused(f"the state in {self.out} was made from other text (digest {record['data']})")
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.copy_(tensors[f"model.{name}"])
                keys = ("step", "exp_avg", "exp_avg_sq")
                found = {key: tensors[f"adam.{name}.{key}"] for key in keys if f"adam.{name}.{key}" in tensors}
                if found:
                    self.optimizer.state[value] = found
        self.progress = Progress(int(record["step"]), float(record["seconds"]))


class StopFlag:
    """Set by SIGTERM or Ctrl-C; the loop ends after the step that it is in, so the state is whole."""

    def __init__(self) -> None:
        self.stopped = False

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopped = True


def run(trainer: Trainer, stop: StopFlag, save_every: float, print_every: float = 15.0) -> bool:
    """Trains until done or stopped. Returns True when the run is complete."""
    saved = printed = time.monotonic()
    recent = list[tuple[float, float]]()
    tokens_per_step = trainer.recipe.rows * trainer.recipe.length
    first_step, first_seconds = trainer.progress.step, trainer.progress.seconds
    while trainer.done_share() < 1.0 and not stop.stopped:
        recent.append(trainer.train_step())
        now = time.monotonic()
        if now - printed >= print_every or trainer.done_share() >= 1.0:
            loss, aux = (float(np.mean([pair[i] for pair in recent])) for i in (0, 1))
            tokens = (trainer.progress.step - first_step) * tokens_per_step
            speed = tokens / max(1e-9, trainer.progress.seconds - first_seconds)
            print(
                f"step {trainer.progress.step} {100 * trainer.done_share():.1f}% loss {loss:.3f} nats/byte "
                f"balance {aux:.2f} {speed:.0f} tokens/s {trainer.progress.seconds:.0f} s",
                flush=True,
            )
            recent, printed = [], now
        if now - saved >= save_every:
            trainer.save()
            saved = time.monotonic()
    trainer.save()
    return trainer.done_share() >= 1.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = Recipe()
    parser = argparse.ArgumentParser(prog="python -m runtime.tiny.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the state and the model")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out, if there is one")
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="length of the whole run")
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps instead of by the clock")
    parser.add_argument("--rows", type=int, default=defaults.rows)
    parser.add_argument("--length", type=int, default=defaults.length, help="tokens a row")
    parser.add_argument("--rate", type=float, default=defaults.rate, help="peak learning rate")
    parser.add_argument("--aux-loss", type=float, default=defaults.aux_loss, help="weight of balance, first half")
    parser.add_argument("--aux-loss-late", type=float, default=defaults.aux_loss_late, help="the same, second half")
    parser.add_argument("--layers", type=int, default=defaults.layers)
    parser.add_argument("--experts", type=int, default=defaults.experts)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between states")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    recipe = Recipe(
        minutes=args.minutes,
        steps=args.steps,
        rows=args.rows,
        length=args.length,
        rate=args.rate,
        aux_loss=args.aux_loss,
        aux_loss_late=args.aux_loss_late,
        layers=args.layers,
        experts=args.experts,
        seed=args.seed,
    )
    present = (args.out / STATE).exists()
    if present and not args.resume:
        print(f"{args.out} already holds a run: name another folder or pass --resume", file=sys.stderr)
        return 2
    stop = StopFlag()
    stop.install()
    try:
        corpus = load_corpus()
        streams = {domain: token_stream(split.train) for domain, split in corpus.items()}
        for domain, stream in streams.items():
            print(f"{domain}: {len(stream)} tokens from {len(corpus[domain].train)} documents", flush=True)
        trainer = Trainer(recipe, streams, args.out)
        if present:
            trainer.load()
            print(f"resumed at step {trainer.progress.step}", flush=True)
        complete = run(trainer, stop, args.save_every)
    except BadInput as error:
        print(str(error), file=sys.stderr)
        return 2
    if not complete:
        print(f"stopped at step {trainer.progress.step}; go on with --resume", flush=True)
        return EXIT_INTERRUPTED
    print(f"done: {trainer.progress.step} steps; the model is in {args.out / 'model'}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
