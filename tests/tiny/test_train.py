"""Training goes on exactly where it stopped, and refuses what it cannot go on from."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from eplane.errors import TrainingRefused
from runtime.tiny import train
from runtime.tiny.corpus import Split, token_stream
from runtime.tiny.sources import Document
from runtime.tiny.train import EXIT_INTERRUPTED, Recipe, StopFlag, Trainer, layer_balance, run

RECIPE = Recipe(steps=4, rows=2, length=32, layers=2, experts=8, warmup=2)
TEXTS = {
    "python": "def f(x):\n    return x + 1\n" * 30,
    "english": "In the beginning was the word. " * 30,
    "chinese": "床前明月光，疑是地上霜。" * 30,
}


def streams() -> dict[str, NDArray[np.int16]]:
    return {domain: token_stream([Document("s", domain, text)]) for domain, text in TEXTS.items()}


def corpus() -> dict[str, Split]:
    return {domain: Split((Document("s", domain, text),), ()) for domain, text in TEXTS.items()}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = Trainer(RECIPE, streams(), tmp_path / "whole")
    assert run(whole, StopFlag(), save_every=1e9)
    first = Trainer(RECIPE, streams(), tmp_path / "parts")
    for _ in range(2):
        first.train_step()
    first.save()
    second = Trainer(RECIPE, streams(), tmp_path / "parts")
    second.load()
    assert second.progress == first.progress
    assert run(second, StopFlag(), save_every=1e9)
    assert second.progress.step == whole.progress.step == 4
    for (name, one), two in zip(whole.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, two), name
    assert (tmp_path / "whole" / "model" / "model.safetensors").read_bytes() == (
        tmp_path / "parts" / "model" / "model.safetensors"
    ).read_bytes()


def test_three_steps_from_nothing_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "load_corpus", corpus)
    monkeypatch.setattr(StopFlag, "install", lambda self: None)
    shape = ["--rows", "2", "--length", "32", "--layers", "2", "--experts", "8"]
    command = ["--out", str(tmp_path / "run"), "--steps", "3", *shape]
    assert train.main(command) == 0
    assert "step 3 100.0% loss" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    assert model.config.model_type == "qwen3_moe"
    assert (model.config.num_hidden_layers, model.config.num_experts) == (2, 8)
    assert train.main(command) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert train.main([*command, "--resume"]) == 0
    assert train.main([*command, "--resume", "--seed", "99"]) == 2
    assert "another recipe" in capsys.readouterr().err


def test_a_stop_ends_after_the_step_with_the_state_saved(tmp_path: Path) -> None:
    trainer, stop = Trainer(RECIPE, streams(), tmp_path), StopFlag()
    stop.stopped = True
    assert not run(trainer, stop, save_every=1e9)
    again = Trainer(RECIPE, streams(), tmp_path)
    again.load()
    assert again.progress.step == 0


def test_a_state_of_other_text_or_with_a_broken_file_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(RECIPE, streams(), tmp_path)
    trainer.train_step()
    trainer.save()
    other = {**streams(), "python": streams()["english"]}
    with pytest.raises(TrainingRefused, match="other text"):
        Trainer(RECIPE, other, tmp_path).load()
    Trainer(replace(RECIPE, minutes=99.0), streams(), tmp_path).load()
    tensors = tmp_path / json.loads((tmp_path / "state.json").read_text())["file"]
    tensors.write_bytes(tensors.read_bytes()[:1000])
    with pytest.raises(TrainingRefused, match="cannot be read"):
        Trainer(RECIPE, streams(), tmp_path).load()


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    trainer = Trainer(RECIPE, streams(), tmp_path)
    with torch.no_grad():
        next(iter(trainer.model.parameters())).fill_(float("nan"))
    with pytest.raises(TrainingRefused, match="lower --rate"):
        trainer.train_step()


def test_the_clock_ends_a_run_and_the_rate_falls(tmp_path: Path) -> None:
    trainer = Trainer(replace(RECIPE, steps=0, minutes=1.0), streams(), tmp_path)
    rates, weights = list[float](), list[float]()
    for step, seconds in ((0, 0.0), (1, 5.0), (2, 30.0), (3, 60.0)):
        trainer.progress.step, trainer.progress.seconds = step, seconds
        rates.append(trainer.rate())
        weights.append(trainer.balance_weight())
    assert rates[0] < rates[1] > rates[2] > rates[3] > 0
    assert weights == [RECIPE.aux_loss] * 2 + [RECIPE.aux_loss_late] * 2
    assert trainer.done_share() == 1.0


def test_sigterm_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom runtime.tiny import train\nfrom runtime.tiny.corpus import Split\n"
        "from runtime.tiny.sources import Document\n"
        f"texts = {TEXTS!r}\n"
        "train.load_corpus = lambda: {d: Split((Document('s', d, t),), ()) for d, t in texts.items()}\n"
        "sys.exit(train.main(sys.argv[1:]))\n"
    )
    shape = ["--rows", "2", "--length", "32", "--layers", "2", "--experts", "8", "--save-every", "0"]
    command = [sys.executable, "-c", code, "--out", str(tmp_path), "--minutes", "60", *shape]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "state.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == EXIT_INTERRUPTED
    assert "go on with --resume" in output
    record = json.loads((tmp_path / "state.json").read_text())
    assert f"stopped at step {record['step']}" in output
    assert [p.name for p in tmp_path.glob("state-*")] == [record["file"]]


def test_balance_is_top_k_when_even_and_grows_as_a_layer_collapses() -> None:
    even = torch.eye(8).repeat(16, 1) * 5 + torch.eye(8).roll(1, dims=1).repeat(16, 1) * 4
    collapsed = torch.zeros(128, 8)
    collapsed[:, :2] = 5.0
    assert float(layer_balance(even, 2)) == pytest.approx(2.0, rel=1e-5)
    assert float(layer_balance(collapsed, 2)) > 7.0
    probing = collapsed.clone().requires_grad_()
    layer_balance(probing, 2).backward()  # type: ignore[no-untyped-call]
    assert probing.grad is not None
    assert (probing.grad[:, :2] > 0).all()
    assert (probing.grad[:, 2:] < 0).all()
