"""The HTTP front of a real two-rank world."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from eplane.load import SubWindow
from eplane.topology import ModelShape
from runtime.link.client import LinkClient
from runtime.link.counters import CounterReader
from runtime.reference import Reference, score_lines
from runtime.tiny import tokens as tiny
from tests.runtime.serving import Serve, complete, serving

Get = Callable[[str], Path]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """The shipped model on two ranks with two redundant slots each."""
    folder = tmp_path_factory.mktemp("world")
    with serving("tiny", folder, 2, "--slots", "18", "--window-steps", "4", "--kv-tokens", "2048") as serve:
        yield serve


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("tiny")


def _ask(url: str, number: int, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    prompt = [tiny.BOS, *(int(t) for t in rng.integers(32, 127, int(rng.integers(2, 150))))]
    body = {"prompt": prompt, "max_tokens": int(rng.integers(1, 24)), "logprobs": 0, "return_token_ids": True}
    answer = complete(url, **{**body, **more})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    return choice


def test_every_token_and_logprob_is_bit_equal_to_one_rank_whatever_the_batch(
    world: Serve, reference: Reference
) -> None:
    with ThreadPoolExecutor(12) as pool:
        greedy = pool.map(lambda n: _ask(world.url, n), range(12))
        drawn = pool.map(lambda n: _ask(world.url, n, temperature=0.9, top_p=0.8, seed=n), range(100, 106))
        answers = [(c, {}) for c in greedy]
        answers += [(c, {"temperature": 0.9, "top_p": 0.8, "seed": 100 + i}) for i, c in enumerate(drawn)]
    lines = [
        json.dumps(
            {
                "prompt_token_ids": c["prompt_token_ids"],
                "token_ids": c["token_ids"],
                "logprobs": c["logprobs"]["token_logprobs"],
                **wish,
            }
        )
        for c, wish in answers
    ]
    out = io.StringIO()
    assert score_lines("tiny", lines, out) == 0
    results = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [r["wrong"] for r in results] == [0] * len(answers)
    assert sum(r["checked"] for r in results) == sum(len(c["token_ids"]) for c, _ in answers)
    choice, _ = answers[0]
    likeliest, logs = reference.score(choice["prompt_token_ids"], choice["token_ids"])
    assert (likeliest, logs) == (choice["token_ids"], choice["logprobs"]["token_logprobs"])


def test_the_check_sees_one_wrong_token_and_one_wrong_bit() -> None:
    reference = Reference("tiny")
    prompt, tokens = [tiny.BOS, *b"import "], []
    for _ in range(4):
        tokens.append(reference.score(prompt, [*tokens, 0])[0][-1])
    good = {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": reference.score(prompt, tokens)[1]}
    other = [*tokens[:2], (tokens[2] + 1) % 256, tokens[3]]
    nearly = [*good["logprobs"][:3], float(np.nextafter(np.float32(good["logprobs"][3]), np.float32(0)))]
    out = io.StringIO()
    cases = [good, {**good, "token_ids": other}, {**good, "logprobs": nearly}]
    score_lines("tiny", [json.dumps(c) for c in cases], out)
    right, token, bit = (json.loads(line) for line in out.getvalue().splitlines())
    assert right == {"wrong": 0, "first_wrong": None, "checked": 4}
    assert token["first_wrong"] == 2
    assert bit == {"wrong": 1, "first_wrong": 3, "checked": 4}
    out = io.StringIO()
    score_lines("tiny", [json.dumps(good)], out, plain=True)
    assert json.loads(out.getvalue())["max_abs_diff"] < 1e-4


def test_text_stop_and_usage(world: Serve) -> None:
    whole = complete(world.url, prompt="The old man ", max_tokens=40, ignore_eos=True).json()
    text = whole["choices"][0]["text"]
    assert whole["usage"] == {"prompt_tokens": 13, "completion_tokens": 40, "total_tokens": 53}
    assert whole["choices"][0]["finish_reason"] == "length"
    stop = text[10:13]
    cut = complete(world.url, prompt="The old man ", max_tokens=40, ignore_eos=True, stop=["never seen", stop]).json()
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < 40


def test_streaming_gives_the_same_text_piece_by_piece(world: Serve) -> None:
    body = {"prompt": "def main():\n", "max_tokens": 24, "return_token_ids": True, "logprobs": 2, "ignore_eos": True}
    whole = complete(world.url, **body).json()["choices"][0]
    events = []
    with httpx.stream("POST", f"{world.url}/v1/completions", json={**body, "stream": True}, timeout=60) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(e)["choices"][0] for e in events[:-1]]
    assert "".join(p["text"] for p in pieces) == whole["text"]
    assert [t for p in pieces for t in p["token_ids"]] == whole["token_ids"]
    assert [x for p in pieces for x in p["logprobs"]["token_logprobs"]] == whole["logprobs"]["token_logprobs"]
    assert pieces[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    best = whole["logprobs"]["top_logprobs"][0]
    assert len(best) == 2
    assert max(best.values()) == whole["logprobs"]["token_logprobs"][0]


def test_same_seed_same_answer_and_no_seed_another(world: Serve) -> None:
    body = {"prompt": "Once upon", "max_tokens": 20, "temperature": 1.0, "return_token_ids": True, "ignore_eos": True}
    one, two, free = (
        complete(world.url, **body, **extra).json()["choices"][0]["token_ids"]
        for extra in ({"seed": 5}, {"seed": 5}, {})
    )
    assert one == two
    assert free != one


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({}, "prompt: "),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [999]}, "a token outside 0..259"),
        ({"prompt": "x", "max_tokens": 5000}, "exceed the 1024 tokens"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens: "),
        ({"prompt": "x", "temperature": -1}, "temperature: "),
        ({"prompt": "x", "logprobs": 99}, "logprobs: "),
        ({"prompt": "x", "n": 2}, "n: "),
    ],
)
def test_bad_requests_are_problems(world: Serve, body: dict[str, Any], detail: str) -> None:
    for stream in (False, True):
        answer = complete(world.url, **body, stream=stream)
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/problem+json"
        assert detail in answer.json()["detail"]
    assert httpx.get(f"{world.url}/nothing").json()["code"] == "not_found"


def test_half_a_surrogate_pair_is_a_problem(world: Serve) -> None:
    raw = rb'{"prompt": "ab\ud83dx", "max_tokens": 2}'
    answer = httpx.post(f"{world.url}/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "the prompt is no text: character 2 is half of a surrogate pair" in answer.json()["detail"]


def test_models_world_and_metrics(world: Serve) -> None:
    assert httpx.get(f"{world.url}/v1/models").json()["data"][0]["id"] == "tiny"
    complete(world.url, prompt="x", max_tokens=2)
    _until(lambda: httpx.get(f"{world.url}/v1/world").json()["steps"] > 0)
    seen = httpx.get(f"{world.url}/v1/world", params={"recent_since": -1}).json()
    assert len(seen["world"]) == 16
    assert [r["rank"] for r in seen["ranks"]] == [0, 1]
    first = seen["ranks"][0]
    assert first["digest"] == seen["digest"]
    assert sum(first["step_ms"]["counts"]) == first["steps"]
    assert {len(row) for row in first["recent"]} == {5}
    text = httpx.get(f"{world.url}/metrics").text
    assert 'eplane_runtime_requests_total{outcome="ok"}' in text
    assert 'eplane_runtime_step_seconds_bucket{le="+Inf",rank="1"}' in text


def test_a_client_that_leaves_frees_its_pages(world: Serve) -> None:
    with httpx.stream(
        "POST", f"{world.url}/v1/completions",
        json={"prompt": "long", "max_tokens": 900, "stream": True, "ignore_eos": True}, timeout=60,
    ) as stream:  # fmt: skip
        lines = stream.iter_lines()  # Held: when it is collected the connection closes.
        next(lines)
        _until(lambda: _sum(world, "running") == 1)
    _until(lambda: _sum(world, "running") == 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{world.url}/v1/completions", json={"prompt": "w", "max_tokens": 900, "ignore_eos": True}, timeout=0.5
        )
    _until(lambda: _sum(world, "running") == 0)
    text = httpx.get(f"{world.url}/metrics").text
    assert 'eplane_runtime_requests_total{outcome="cancelled"} 2.0' in text


def _sum(world: Serve, name: str) -> int:
    return sum(int(r[name]) for r in httpx.get(f"{world.url}/v1/world").json()["ranks"])


def _until(met: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def test_idle_ranks_tick_and_count_nothing_and_windows_end_at_the_same_steps(world: Serve) -> None:
    readers = [CounterReader(world.folder / "link" / f"rank{r}.counters") for r in range(2)]
    _until(lambda: _sum(world, "running") == 0)
    before = _windows(readers)
    base = before[0][-1].last_step
    complete(world.url, prompt="abcdefg", max_tokens=9, ignore_eos=True)  # 8 prompt tokens, then 8 decode steps.
    _until(lambda: min(w[-1].last_step for w in _windows(readers)) > base + 40)
    rows = [[w for w in windows if w.last_step > base] for windows in _windows(readers)]
    ends = [{(w.first_step, w.last_step) for w in row} for row in rows]
    assert all(last - first == 4 and last % 4 == 0 for first, last in ends[0] & ends[1])
    prefill = sum(int(w.prefill.sum()) for row in rows for w in row)
    decode = sum(int(w.decode.sum()) for row in rows for w in row)
    layers, top_k = 8, 4
    assert prefill == 8 * layers * top_k
    assert decode == 8 * layers * top_k


async def test_ranks_tell_which_experts_tokens_went_to_together(world: Serve) -> None:
    complete(world.url, prompt="The old man and the sea", max_tokens=12, ignore_eos=True)
    _until(lambda: _sum(world, "running") == 0)
    told = 0
    for rank in range(2):
        windows = CounterReader(world.link(rank).with_suffix(".counters")).read_since(0)[1:]  # The first is all of old.
        counted = {(w.first_step, w.last_step) for w in windows}
        first, last = windows[0].first_step, windows[-1].last_step
        link = LinkClient(world.link(rank))
        said = await link.connect("ab" * 8)
        assert said.capabilities.routing_sample
        for one in (await link.samples(0)).samples:
            one.check(ModelShape(said.model, said.layers, said.experts, said.top_k, said.bundle_bytes))
            assert one.rank == rank
            assert len(one.sample) == min(32, one.sample.tokens)
            assert one.last_step - one.first_step == 4
            assert (one.first_step, one.last_step) in counted or not first <= one.first_step < last
            told += len(one.sample)
        await link.close()
    assert told > 20


def _windows(readers: list[CounterReader]) -> list[list[SubWindow]]:
    return [reader.read_since(0) for reader in readers]
