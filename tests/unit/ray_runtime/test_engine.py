"""The life of the embedded engine: sleep, wake, updates, pauses; and what a sample does not depend on."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlflow.backends.ray_runtime import rollout
from rlflow.backends.ray_runtime.engine import Engine, weights_digest
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.protocol.samples import Segment
from tests.unit.ray_runtime.rollout_jobs import TEXTS, load, model, op, paused, prompts, rows, sampled, stop_at_step

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: list[Literal["qwen3", "llama", "qwen3_moe"]] = ["qwen3", "llama", "qwen3_moe"]


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


# --- samples do not depend on what is beside them --------------------------------------------------------------------


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    order=st.permutations(range(8)),
    count=st.integers(1, 8),
    n=st.integers(1, 5),
    most=st.integers(1, 40),
    share=st.sampled_from([0, 1, 3, 8, 10**9]),
    options=st.sampled_from([{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}]),
)
def test_a_sample_does_not_depend_on_its_batch(
    kind: Any,
    order: list[int],
    count: int,
    n: int,
    most: int,
    share: int,
    options: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Subsets in any order, other numbers of samples, in waves, with and without compaction; in float32."""
    key = (kind, tuple(options.items()))
    if key not in _expected:
        loaded = model(kind)
        everyone = prompts(loaded, [*TEXTS, "9+9=", "123456789+1=", "7"])
        samples = RolloutEngine(loaded, "fp32").generate(everyone, op(n=5, **options), seed=3, step=5)
        pairs = zip(samples.array("uid").tolist(), samples.array("sample").tolist(), strict=True)
        _expected[key] = loaded, everyone, dict(zip(pairs, rows(samples), strict=True))
    loaded, everyone, expected = _expected[key]
    monkeypatch.setattr(rollout, "_MAX_ROWS", most)
    monkeypatch.setattr(rollout, "_COMPACT_SHARE", share)
    chosen = everyone.select(order[:count])
    samples = RolloutEngine(loaded, "fp32").generate(chosen, op(n=n, **options), seed=3, step=5)
    pairs = zip(samples.array("uid").tolist(), samples.array("sample").tolist(), strict=True)
    assert rows(samples) == [expected[pair] for pair in pairs]


_expected: dict[Any, Any] = {}


# --- sleep and wake --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_sleep_frees_what_is_measured_and_wake_brings_it_back(kind: Any, compute: Any) -> None:
    engine = RolloutEngine(model(kind), compute, own=True)
    before = sampled(engine)
    tensors = engine.local_tensors()
    size = sum(tensor.numel() for tensor in tensors.values()) * (4 if compute == "fp32" else 2)
    awake = engine.residency()
    copies = engine._decoder.copied_bytes()
    assert (awake.weights, awake.host, awake.kv) == (size + copies, 0, 0)
    digest = weights_digest(tensors)
    asleep = engine.sleep(1)
    assert (asleep.weights, asleep.host, asleep.kv) == (0, size, 0)
    half = engine.wake(["weights"])
    assert (half.weights, half.host) == (size + copies, 0)
    with pytest.raises(RunFailure, match=r"generate while the engine is asleep \(kv\)"):
        sampled(engine)
    engine.wake(["kv"])
    assert weights_digest(tensors) == digest  # the same tensors
    assert rows(sampled(engine)) == rows(before)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_of_the_process(level: Any) -> None:
    loaded = model("qwen3", hidden=512, intermediate=6144)
    engine = RolloutEngine(loaded, "bf16", own=True)
    size = engine.residency().weights
    copies = engine._decoder.copied_bytes()
    assert size > 60 << 20
    before = resident()
    asleep = engine.sleep(level)
    freed = before - resident()
    engine.wake()
    back = before - resident() - (size - engine.residency().weights)  # without weights there are no copies of them
    assert asleep.host == (0 if level == 2 else size - copies)
    assert abs(freed - size + asleep.host) < 0.1 * size  # host memory is memory of the same process here
    assert abs(back) < 0.1 * size


def resident() -> int:
    """Bytes of this process in memory, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("level", [1, 2])
def test_cycles_of_sleep_leave_nothing_behind(level: Any) -> None:
    loaded = model("qwen3", hidden=256, intermediate=2048)
    engine = RolloutEngine(loaded, "fp32", own=True)
    expected, seen, memory = rows(sampled(engine)), [], []
    for cycle in range(11):
        asleep = engine.sleep(level)
        engine.wake()
        if level == 2:
            load(engine, loaded, cycle)
        samples = engine.generate(prompts(loaded, ["1+2="]), op(max_new=2), seed=3, step=5)
        assert samples.rows == 4  # memory for keys and values comes and goes
        seen.append((asleep, engine.residency()))
        if cycle in (0, 10):
            memory.append(resident())
    assert rows(sampled(engine)) == expected
    assert seen == [seen[0]] * 11
    # Ten cycles after the first, which warms up: what one of them may lose is a small part of the weights.
    assert memory[-1] - memory[0] < 10 * 0.02 * engine.residency().weights


def test_a_tensor_without_memory_cannot_be_taken_for_weights() -> None:
    engine = RolloutEngine(model("qwen3"), "bf16", own=True)
    norm = engine.local_tensors()["model.norm.weight"]
    engine.sleep(1)
    assert norm.shape == (32,)
    assert torch.isnan(norm).all()
    with pytest.raises(RuntimeError, match="single memory location"):
        norm.copy_(torch.ones(32))


def test_deep_sleep_needs_an_update() -> None:
    loaded = model("qwen3")
    engine = RolloutEngine(loaded, "fp32", own=True)
    before = sampled(engine)
    assert engine.sleep(2).host == 0
    with pytest.raises(RunFailure, match=r"asleep \(weights and kv\)") as caught:
        sampled(engine)
    assert caught.value.code == "RLF5006"
    with pytest.raises(RunFailure, match="weights are asleep"):
        engine.begin_update(1)
    with pytest.raises(RunFailure, match="kv before the weights"):
        engine.wake(["kv"])
    engine.wake()
    with pytest.raises(RunFailure, match="has no weights since it slept"):
        sampled(engine)
    load(engine, loaded, 1)
    assert rows(sampled(engine)) == rows(before)  # rotary tables too are there
    assert sampled(engine).array("version").tolist() == [1] * 20


def test_weights_of_the_trainer_do_not_sleep() -> None:
    loaded = model("qwen3")
    engine = RolloutEngine(loaded, "fp32")
    before = sampled(engine)
    engine.sleep(2)
    assert engine.residency().weights == 0  # they are the trainer's
    Trainer(loaded, "fp32").logprobs(before, 1.0)
    engine.wake()
    assert rows(sampled(engine)) == rows(before)


def test_a_copy_of_the_trainers_weights_is_loaded_after_deep_sleep() -> None:
    engine = RolloutEngine(model("qwen3"), "bf16")
    before = sampled(engine)
    engine.sleep(2)
    engine.wake()
    engine.load_weights(3)
    assert engine.version == 3
    assert rows(sampled(engine)) == rows(before)


def test_the_cache_is_measured_while_it_is_there(aside: ThreadPoolExecutor) -> None:
    engine = RolloutEngine(model("qwen3"), "fp32", own=True)
    future = paused(engine, aside, 3, lambda: sampled(engine), "keep")
    layers, kv_heads, size, slots = 2, 2, 8, 64  # the first growth of the cache: to 64 slots
    assert engine.residency().kv >= 2 * layers * kv_heads * size * slots // 2 * 4
    engine.sleep(1)
    assert engine.residency().kv == 0
    engine.wake()
    engine.resume()
    future.result(30)


# --- updates ---------------------------------------------------------------------------------------------------------


def test_an_update_is_what_was_sent() -> None:
    engine, other = RolloutEngine(model("llama"), "fp32", own=True), model("llama", seed=1)
    good = weights_digest(RolloutEngine(other, "fp32", own=True).local_tensors())
    load(engine, other, 4, good)
    assert engine.version == 4
    assert rows(sampled(engine)) == rows(sampled(RolloutEngine(other, "fp32")))
    engine.begin_update(5)
    engine.local_tensors()["model.norm.weight"][3] += 1
    with pytest.raises(RunFailure, match="while the engine is getting the weights of version 5"):
        sampled(engine)
    with pytest.raises(RunFailure, match="version 5 are not those that were sent") as caught:
        engine.end_update(good)
    assert caught.value.code == "RLF5018"
    with pytest.raises(RunFailure, match="an update failed"):
        sampled(engine)
    engine.begin_update(5)
    engine.local_tensors()["model.norm.weight"][3] -= 1
    engine.end_update(good)
    assert engine.version == 5


def test_a_half_update_is_refused() -> None:
    engine = RolloutEngine(model("qwen3"), "fp32", own=True)
    engine.begin_update(1)
    with pytest.raises(RunFailure, match=r"1 tensors that the engine does not have: model\.layers\.7"):
        engine.update(["model.layers.7.mlp.up_proj.weight"])
    engine.update(list(engine.local_tensors())[1:])
    with pytest.raises(RunFailure, match=r"1 of 24 tensors of version 1 were not sent: model\.embed_tokens\.weight"):
        engine.end_update()
    with pytest.raises(RunFailure, match="end_update outside of an update"):
        engine.end_update()
    with pytest.raises(RunFailure, match="update outside of an update"):
        engine.update(engine.local_tensors())
    engine.begin_update(1)
    engine.update(engine.local_tensors())
    engine.end_update()
    with pytest.raises(RunFailure, match="version 0 were sent to an engine that has version 1"):
        engine.begin_update(0)
    with pytest.raises(RunFailure, match="weights of another pool"):
        engine.load_weights(2)


def test_weights_of_another_pool_do_not_keep_the_loaded_model() -> None:
    loaded = model("qwen3")
    engine = RolloutEngine(loaded, "bf16", own=True)
    mine = {tensor.untyped_storage().data_ptr() for tensor in engine.local_tensors().values()}
    assert not mine & {parameter.untyped_storage().data_ptr() for parameter in loaded.model.parameters()}
    assert engine.loaded.model is not loaded.model
    assert {tensor.dtype for tensor in engine.local_tensors().values()} == {torch.bfloat16}


def test_bf16_keeps_the_rotary_frequencies() -> None:
    """Rounded to bf16 they are some radians off at position 1500, and what is sampled is not what is trained."""
    loaded = model("qwen3", context=2048)
    batch = prompts(loaded, ["12+34=5" * 214])
    samples = RolloutEngine(loaded, "bf16").generate(batch, op(max_new=20), seed=3, step=5)
    trained = Trainer(loaded, "bf16").logprobs(samples, 1.0)
    difference = (trained.values - samples.packed("logprobs").values).abs()
    assert float(difference.mean()) < 0.05


# --- pauses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["nothing", "sleep", "compacted"])
def test_a_pause_changes_no_token(
    kind: Any, what: str, aside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "compacted":
        monkeypatch.setattr(rollout, "_COMPACT_SHARE", 10**9)
    engine = RolloutEngine(model(kind), "fp32", own=True)
    expected = sampled(engine)
    future = paused(engine, aside, 7, lambda: sampled(engine), "keep")
    assert not future.done()
    if what != "nothing":
        engine.sleep(1)
        engine.wake()
    engine.resume()
    samples = future.result(30)
    assert rows(samples) == rows(expected)
    if what == "nothing":
        assert torch.equal(samples.packed("logprobs").values, expected.packed("logprobs").values)
    assert samples.items("versions") == [(Segment(0, len(row)),) for row in rows(samples)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 4, 11])
def test_every_token_has_the_version_that_made_it(kind: Any, step: int, aside: ThreadPoolExecutor) -> None:
    old, new = model(kind), model(kind, seed=1)
    engine = RolloutEngine(old, "fp32", own=True)
    future = paused(engine, aside, step, lambda: sampled(engine), "keep")
    load(engine, new, 1)
    engine.resume()
    samples = future.result(30)
    by_version = [Trainer(loaded, "fp32").logprobs(samples, 1.0) for loaded in (old, new)]
    mixed = 0
    for row, parts in enumerate(samples.items("versions")):
        at = 0
        for part in parts:
            made = samples.packed("logprobs").row(row)[at : at + part.tokens]
            expected = by_version[part.version].row(row)[at : at + part.tokens]
            torch.testing.assert_close(made, expected, atol=2e-5, rtol=0)
            at += part.tokens
        assert at == len(samples.packed("response_ids").row(row))
        assert parts[0].version == samples.array("version")[row]
        mixed += len(parts) > 1
        if len(parts) > 1:
            assert parts[0] == Segment(0, step)
    assert mixed > 1


def test_what_a_pause_does_not_allow(aside: ThreadPoolExecutor) -> None:
    engine = RolloutEngine(model("qwen3"), "fp32", own=True)
    with pytest.raises(RunFailure, match="not paused"):
        engine.resume()
    reached = stop_at_step(engine, 3)
    future = aside.submit(lambda: sampled(engine))
    assert reached.wait(30)
    for call in (lambda: engine.sleep(1), lambda: engine.begin_update(1), lambda: engine.load_weights(1)):
        with pytest.raises(RunFailure, match="while samples are generated") as caught:
            call()
        assert "pause the engine first" in caught.value.help
    engine.pause()
    with pytest.raises(RunFailure, match="paused already"):
        engine.pause()
    engine.begin_update(1)
    engine.resume()
    with pytest.raises(RunFailure, match="generate while the engine is getting the weights of version 1"):
        future.result(30)


def test_a_pause_that_nobody_ends(aside: ThreadPoolExecutor) -> None:
    engine = RolloutEngine(model("qwen3"), "fp32", own=True, wait_seconds=0.2)
    engine.pause()
    with pytest.raises(RunFailure, match=r"did not resume the paused engine within 0\.2 s") as caught:
        sampled(engine)
    assert caught.value.code == "RLF5006"
    engine.resume()
    assert sampled(engine).rows == 20


def test_generate_waits_for_the_end_of_a_pause(aside: ThreadPoolExecutor) -> None:
    engine = RolloutEngine(model("qwen3"), "fp32", own=True)
    expected = sampled(engine)
    engine.pause()
    future = aside.submit(lambda: sampled(engine))
    threading.Event().wait(0.05)
    assert not future.done()
    load(engine, model("qwen3"), 2)
    engine.resume()
    samples = future.result(30)
    assert rows(samples) == rows(expected)
    assert set(samples.array("version")) == {2}


def test_it_is_an_engine() -> None:
    engine: Engine = cast("Engine", RolloutEngine(model("qwen3"), "fp32"))
    for name in vars(Engine):
        if not name.startswith("_"):
            assert hasattr(engine, name)
