"""Drawn lengths against their distributions, and what their randomness hangs on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import log, sqrt
from pathlib import Path

import pytest

from rlflow.backends.simulator.sampling import sampled_requests
from rlflow.backends.simulator.sampling_trace import read_trace
from rlflow.cost.draws import LengthSampler
from rlflow.cost.errors import WorkloadError
from rlflow.cost.lengths import Fixed, Lengths, Lognormal, Mixture, Trace, mean

SKEWED = Lognormal(log(20_000), 0.5, 0.6, 60_000)
GROUPS = Trace(tuple(float(1000 * prompt + 10 * sample) for prompt in (1, 9, 3, 7) for sample in range(5)), group=5)
DISTRIBUTIONS: list[Lengths] = [
    SKEWED,
    Lognormal(log(20_000), 0.7, 0.0, 1e9),
    Lognormal(log(20_000), 0.0, 0.7, 1e9),
    Trace(tuple(float(1000 + 37 * i * i % 9000) for i in range(50))),
    GROUPS,
    Mixture(((0.3, Lognormal(log(2000), 0.2, 0.2, 60_000)), (0.0, Fixed(5.0)), (0.7, SKEWED))),
]


@pytest.mark.parametrize("lengths", DISTRIBUTIONS, ids=lambda lengths: type(lengths).__name__)
def test_one_sample_of_each_prompt_follows_the_distribution(lengths: Lengths) -> None:
    sampler, count = LengthSampler(lengths, seed=1), 20_000
    drawn = [sampler.tokens(step, prompt, 3) for step in range(10) for prompt in range(count // 10)]
    # Kolmogorov's test at 1e-4, at the quantiles; a token is added for rounding.
    bound = sqrt(log(2 / 1e-4) / (2 * count))
    for q in range(1, 100):
        x = lengths.quantile(q / 100)
        assert sum(tokens <= x + 1 for tokens in drawn) / count > lengths.cdf(x) - bound, q
        assert sum(tokens < x for tokens in drawn) / count < lengths.cdf(x * (1 - 1e-9)) + bound, q
    assert sum(drawn) / count == pytest.approx(mean(lengths), rel=0.03)
    assert max(drawn) <= lengths.maximum


@pytest.mark.parametrize("lengths", DISTRIBUTIONS, ids=lambda lengths: type(lengths).__name__)
def test_samples_of_a_prompt_are_as_alike_as_the_distribution_says(lengths: Lengths) -> None:
    sampler, count, n = LengthSampler(lengths, seed=2), 5000, 4
    longest = [max(sampler.group(0, prompt, n)) for prompt in range(count)]
    for q in (0.3, 0.6, 0.8, 0.9, 0.95):
        x = lengths.quantile(q)
        for share, expected in (
            (sum(tokens <= x + 1 for tokens in longest) / count, lengths.group_cdf(x, n)),
            (sum(tokens < x for tokens in longest) / count, lengths.group_cdf(x * (1 - 1e-9), n)),
        ):
            spread = sqrt(expected * (1 - expected) / count)
            # A token of rounding can matter only where the distribution has a jump of its own.
            assert abs(share - expected) < 4.5 * spread + 2e-3, (q, share, expected)


def test_rounding_leaves_the_mean_and_makes_neighbours() -> None:
    sampler = LengthSampler(Fixed(3.7), seed=0)
    drawn = [sampler.tokens(0, prompt) for prompt in range(10_000)]
    assert set(drawn) == {3, 4}
    assert sum(drawn) / len(drawn) == pytest.approx(3.7, abs=0.02)
    assert LengthSampler(Fixed(4.0), seed=0).group(0, 0, 9) == [4] * 9
    assert LengthSampler(Fixed(0.0), seed=0).tokens(0, 0) >= 1


def test_the_limit_is_a_point_mass_even_where_the_logarithm_is_huge() -> None:
    assert LengthSampler(Lognormal(5000.0, 1.0, 1.0, 777.0), seed=0).group(0, 0, 5) == [777] * 5


def test_a_length_hangs_on_its_key_alone() -> None:
    sampler = LengthSampler(SKEWED, seed=5)
    keys = [(step, prompt, sample) for step in range(5) for prompt in range(20) for sample in range(4)]
    forward = {key: sampler.tokens(*key) for key in keys}
    again = LengthSampler(SKEWED, seed=5)
    assert {key: again.tokens(*key) for key in reversed(keys)} == forward
    assert again.group(3, 7, 4) == [forward[3, 7, sample] for sample in range(4)]


@pytest.mark.parametrize(
    "other",
    [
        lambda i: LengthSampler(SKEWED, seed=6).tokens(0, i, 0),
        lambda i: LengthSampler(SKEWED, seed=5, stream="other").tokens(0, i, 0),
        lambda i: LengthSampler(SKEWED, seed=5).tokens(1, i, 0),
        lambda i: LengthSampler(SKEWED, seed=5).tokens(i, 0, 0),
        lambda i: LengthSampler(SKEWED, seed=5).tokens(0, i + 1, 0),
        lambda i: LengthSampler(SKEWED, seed=5).tokens(0, -i - 1, 0),
        lambda i: LengthSampler(Lognormal(log(20_000), 0.0, 0.7, 60_000), seed=5).tokens(0, i, 1),
    ],
)
def test_other_keys_are_independent(other: Callable[[int], int]) -> None:
    sampler, count = LengthSampler(Lognormal(log(20_000), 0.0, 0.7, 60_000), seed=5), 4000
    ours, theirs = [log(sampler.tokens(0, i, 0)) for i in range(count)], [log(other(i)) for i in range(count)]
    a, b = sum(ours) / count, sum(theirs) / count
    together = sum((x - a) * (y - b) for x, y in zip(ours, theirs, strict=True))
    spread = sqrt(sum((x - a) ** 2 for x in ours) * sum((y - b) ** 2 for y in theirs))
    assert abs(together / spread) < 4 / sqrt(count)


def test_drift_changes_every_length_alike() -> None:
    now, later = (
        LengthSampler(lengths, 3) for lengths in (Lognormal(9, 0.4, 0.4, 1e9), Lognormal(9, 0.4, 0.4, 1e9).scaled(1.5))
    )
    for prompt in range(50):
        assert later.tokens(0, prompt, 2) == pytest.approx(1.5 * now.tokens(0, prompt, 2), abs=3)


def test_the_hash_seed_of_the_process_does_not_matter() -> None:
    code = (
        "from rlflow.cost.draws import LengthSampler\n"
        "from rlflow.cost.lengths import Lognormal\n"
        "print(LengthSampler(Lognormal(8, 1, 1, 1e6), 4, 'x').group(1, 2, 20))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert printed[0].strip() == str(LengthSampler(Lognormal(8, 1, 1, 1e6), 4, "x").group(1, 2, 20))


def test_requests_of_a_step_come_in_groups() -> None:
    prompts, responses = LengthSampler(SKEWED, 0, "prompt"), LengthSampler(SKEWED, 0)
    requests = sampled_requests(prompts, responses, step=2, count=3, samples=4)
    assert [request.id for request in requests] == [(2, p, s) for p in range(3) for s in range(4)]
    assert [request.length for request in requests[4:8]] == responses.group(2, 1, 4)
    assert {(request.group, request.prompt) for request in requests} == {
        ((2, p), prompts.tokens(2, p)) for p in range(3)
    }
    with pytest.raises(WorkloadError, match="different names"):
        sampled_requests(responses, responses, 0, 1)


def test_unknown_distributions_are_refused_also_inside_others() -> None:
    @dataclass(frozen=True)
    class Odd(Fixed):
        pass

    class Stranger:
        maximum = 5.0

    LengthSampler(Odd(3.0), 0)
    for lengths in (Stranger(), Mixture(((1.0, Stranger()),))):  # type: ignore[arg-type]
        with pytest.raises(WorkloadError, match="Stranger"):
            LengthSampler(lengths, 0)  # type: ignore[arg-type]


# --- traces ----------------------------------------------------------------------------------------------------------


def test_a_trace_is_read_with_its_groups(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("prompt,tokens\nb,10\na,20\nb,30\na,40\n")
    assert read_trace(file, "tokens") == Trace((10, 20, 30, 40))
    assert read_trace(file, "tokens", prompt="prompt") == Trace((10, 30, 20, 40), group=2)


@pytest.mark.parametrize(
    ("text", "prompt", "why"),
    [
        ("prompt,other\nb,10\n", None, "no column 'tokens'"),
        ("tokens\n10\n", "prompt", "no column 'prompt'"),
        ("tokens\n", None, "no rows"),
        ("", None, "no column"),
        ("tokens\n10\nmany\n", None, ":3: 'many'"),
        ("tokens,other\n10,1\n\n5\n-1,1\n", None, ":5: -1"),
        ("tokens\nnan\n", None, "nan tokens are impossible"),
        ("tokens\ninf\n", None, "inf tokens are impossible"),
        ("prompt,tokens\na,10\na,11\nb,3\n", "prompt", "1 to 2 samples"),
        ("prompt,tokens\na\n", "prompt", "None is not a number"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, prompt: str | None, why: str) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text(text)
    with pytest.raises(WorkloadError, match=why):
        read_trace(file, "tokens", prompt)
