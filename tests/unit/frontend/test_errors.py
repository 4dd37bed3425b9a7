"""Every mistake the frontend knows: code, message with both numbers, exact place, help; and its sound twin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

TAKE = "questions.take(8 prompts)"
GENERATE = "actor.generate(batch, n = group, max_new = 16 tokens)"
TRAIN = "reference = ref, loss = ppo_clip(0.2) + 0.01 * kl(k3)"
LOSS = "ppo_clip(0.2) + 0.01 * kl(k3)"
ADAM = "adamw(lr = 1e-4)"
MINI = "minibatch = 16 samples"
STOP = "stop after 10 steps"
HOST = "host = 2 * ascend_910b { memory = 1.5 TiB, cpus = 64 }"


@dataclass(frozen=True)
class Mistake:
    """`bad` replaces `text` and must give exactly one error at `place`; `good` replaces it and must compile."""

    text: str
    bad: str
    good: str
    code: str
    place: str
    says: str
    help: str = ""
    note: str = ""
    second: str | None = None
    """The other place shown."""


MISTAKES = [
    # --- 1001 unknown name
    Mistake(TAKE, "qestions.take(8 prompts)", TAKE, "RLF1001", "qestions", "unknown name `qestions`", "`questions`"),
    Mistake(TAKE, "questions.tak(8 prompts)", TAKE, "RLF1001", "tak", "unknown stage of data `questions`: `tak`", "`take`"),
    Mistake("group_normalize(score)", "group_normalise(score)", "group_normalize(score)", "RLF1001", "group_normalise",
            "unknown function `group_normalise`", "`group_normalize`"),
    Mistake("group_normalize(score)", "group_normalize(scor)", "group_normalize(score)", "RLF1001", "scor",
            "unknown name `scor`", "`score`"),
    Mistake("n = group,", "n = groop,", "n = group,", "RLF1001", "groop", "unknown name `groop`", "`group`"),
    Mistake(LOSS, "ppo_klip(0.2)", LOSS, "RLF1001", "ppo_klip", "unknown loss term `ppo_klip`", "`ppo_clip`"),
    Mistake("kl(k3)", "kl(k4)", "kl(k1)", "RLF1001", "k4", "unknown `estimator`: `k4`", note="`k1`, `k2`, `k3`"),
    Mistake(ADAM, "adam(lr = 1e-4)", ADAM, "RLF1001", "adam", "unknown optimizer `adam`", "`adamw`"),
    Mistake("tiny(", "tinny(", "tiny(", "RLF1001", "tinny", "unknown kind of model `tinny`", "`tiny`"),
    Mistake("frozen(actor)", "frozen(aktor)", "frozen(actor)", "RLF1001", "aktor", "unknown model `aktor`", "`actor`"),
    Mistake("= qwen3", "= qwen2", "= llama", "RLF1001", "qwen2", "unknown `architecture`: `qwen2`", "`qwen3`"),
    Mistake("place exact on cpu", "place exakt on cpu", "place exact on cpu", "RLF1001", "exakt",
            "unknown model or reward `exakt`", "`exact`"),
    Mistake("place actor, first on", "place actor.trian, first on", "place actor.train, first on", "RLF1001", "trian",
            "unknown stage of `actor`: `trian`", "`train`"),
    Mistake("on main with", "on mian with", "on main with", "RLF1001", "mian", "unknown pool `mian`", "`main`"),
    Mistake("schedule f on pod", "schedule f on pot", "schedule f on pod", "RLF1001", "pot", "unknown cluster `pot`", "`pod`"),
    Mistake("schedule f on pod", "schedule g on pod", "schedule f on pod", "RLF1001", "g", "unknown flow `g`"),
    Mistake("2 * ascend_910b", "2 * ascend_910", "2 * h100", "RLF1001", "ascend_910",
            "unknown device or host `ascend_910`", "`ascend_910c`"),
    Mistake("allow actor", "allow acter", "allow actor", "RLF1001", "acter", "unknown model `acter`", "`actor`"),
    Mistake("truncated_is(2.0)", "trunkated_is(2.0)", "truncated_is(3)", "RLF1001", "trunkated_is",
            "unknown correction `trunkated_is`", "`truncated_is`"),
    # --- 1002 defined twice
    Mistake("ref = first", "batch = exact(samples) ref = first", "ref = first", "RLF1002", "batch", "`batch` is assigned twice", "once",
            second="batch"),
    Mistake("model first", "model actor = frozen(actor) model first", "model first", "RLF1002", "actor", "`actor` is declared twice", second="actor"),
    Mistake("model first", "model questions = frozen(actor) model first", "model first", "RLF1002", "questions", "`questions` is declared twice",
            second="questions"),
    Mistake("ref = first", "exact = first.logprobs(samples) ref = first", "ref = first", "RLF1002", "exact", "`exact` is already a reward", second="exact"),
    Mistake("reward exact", 'reward group_normalize = python("a:b") reward exact', "reward exact", "RLF1002", "group_normalize",
            "`group_normalize` is already a function of the language"),
    Mistake("flow f(group = 4)", "flow f(group = 4, group = 5)", "flow f(group = 4, other = 5)", "RLF1002", "group",
            "parameter `group` is declared twice", second="group"),
    Mistake("flow f(group = 4)", "flow f(group = 4, ref = 5)", "flow f(group = 4, r = 5)", "RLF1002", "ref",
            "`ref` is already a parameter of the flow"),
    Mistake("n = group, max", "n = 4, n = group, max", "n = group, max", "RLF1002", "n = group", "`n` is given twice",
            second="n = 4"),
    Mistake("evaluate heldout", "evaluate samples", "evaluate held", "RLF1002", "samples", "`samples` names something else"),
    Mistake("seed 7", "seed 7 seed 8", "seed 8", "RLF1002", "seed 8", "flow `f` has two `seed` parts", second="seed 7"),
    Mistake(STOP, STOP + " stop after 1 epoch", STOP, "RLF1002", "stop after 1 epoch", "flow `f` has two `stop` parts",
            second=STOP),
    Mistake("pool main = 4 devices", "pool main = 4 devices pool main = 2 devices", "pool main = 4 devices", "RLF1002",
            "main", "pool `main` is defined twice", second="pool main = 4 devices"),
    Mistake("pool main = 4 devices", "pool main = 4 devices pool cpu = 2 devices", "pool main = 4 devices", "RLF1002",
            "cpu", "`cpu` is the pool of Python stages", "workers"),
    Mistake("place exact on cpu with workers = 2", "place actor on main", "place exact on cpu", "RLF1002",
            "place actor on main", "`samples` is placed twice", second="place actor, first on main with dp = 4"),
    Mistake("hosts = 2 * host", "host = 2 * host", "hosts = 2 * host", "RLF1002", "host", "`host` is defined twice"),
    Mistake(HOST, "a100 = 2 * ascend_910b host = 2 * a100", "a = 2 * ascend_910b host = 2 * ascend_910b", "RLF1002", "a100",
            "`a100` is a device already"),
    Mistake("cluster pod {", "cluster pod { host = 1 * cpu }\ncluster pod {", "cluster pot { host = 1 * cpu }\ncluster pod {",
            "RLF1002", "pod", "cluster `pod` is defined twice", second="pod"),
    Mistake("cluster pod {", "cluster local { host = 1 * cpu }\ncluster pod {", "cluster pod {", "RLF1002", "local",
            "`local` is this machine"),
    Mistake("with dp = 4", "with dp = 4, dp = 2", "with dp = 4, tp = 1", "RLF1002", "dp = 2", "`dp` is given twice",
            second="dp = 4"),
    # --- 1003 unknown keyword
    Mistake("timeout = 5 s", "time_out = 5 s", "timeout = 5 s", "RLF1003", "time_out",
            "unknown argument of `python`: `time_out`", "`timeout`"),
    Mistake("max_new = 16 tokens)\n    ref", "max_new = 16 tokens, top = 3)\n    ref", "max_new = 16 tokens, top_k = 3)\n    ref",
            "RLF1003", "top", "unknown argument of `generate`: `top`", "`top_"),
    Mistake("frozen(actor)", "frozen(actor, 3)", "frozen(actor)", "RLF1003", "3", "`frozen` takes 1 argument at most"),
    Mistake("memory = 1.5 TiB,", "memroy = 1.5 TiB,", "memory = 1.5 TiB,", "RLF1003", "memroy",
            "unknown host setting `memroy`", "`memory`"),
    Mistake("with dp = 4", "with ddp = 4", "with dp = 4", "RLF1003", "ddp", "unknown setting of `place`: `ddp`", "`dp`"),
    Mistake("with workers = 2", "with dp = 2", "with workers = 3", "RLF1003", "dp", "unknown setting of `place`: `dp`",
            note="`workers`"),
    Mistake("hosts = 2 * host", "hosts = 2 * host { cpus = 3 }", "hosts = 2 * host", "RLF1003", "cpus = 3",
            "`hosts` only counts hosts", "where `host` is defined"),
    # --- 1004 missing argument
    Mistake(GENERATE, "actor.generate(batch, n = group)", GENERATE, "RLF1004", "actor.generate(batch, n = group)",
            "`generate` needs `max_new`"),
    Mistake(ADAM, "adamw()", ADAM, "RLF1004", "adamw()", "`adamw` needs `lr`: learning rate"),
    Mistake(TRAIN, "loss = " + LOSS, "loss = ppo_clip(0.2) + 0 * kl(k3)", "RLF1004", LOSS, "the loss has a `kl` term",
            "reference = ref"),
    Mistake("flow f(group = 4)", "flow f(group)", "flow f(group = 2)", "RLF1004", "group",
            "parameter `group` of flow `f` has no value", "--set group=VALUE"),
    # --- 1005 wrong unit, both ways
    Mistake(TAKE, "questions.take(8)", TAKE, "RLF1005", "8", "`count` counts prompts, and this number has no unit", "`8 prompts`"),
    Mistake(TAKE, "questions.take(8 samples)", TAKE, "RLF1005", "8 samples",
            "`count` counts prompts, and `8 samples` counts samples"),
    Mistake(MINI, "minibatch = 16 prompts", MINI, "RLF1005", "16 prompts",
            "`minibatch` counts samples, and `16 prompts` counts prompts"),
    Mistake("n = group,", "n = 4 samples,", "n = 4,", "RLF1005", "4 samples", "`n` is a whole number without a unit"),
    Mistake(ADAM, "adamw(lr = 1 s)", ADAM, "RLF1005", "1 s", "`lr` is a number without a unit"),
    Mistake("timeout = 5 s", "timeout = 5", "timeout = 5 ms", "RLF1005", "5", "`timeout` is a time, and the plain number 5 is none",
            "`5 s`"),
    Mistake("timeout = 5 s", "timeout = 5 GiB", "timeout = 5 min", "RLF1005", "5 GiB", "`timeout` is a time", "`5 s`"),
    Mistake(TAKE, "questions.take(4 prompts + 4 samples)", "questions.take(4 prompts + 4 prompts)", "RLF1005",
            "4 prompts + 4 samples", "cannot add 4 prompts and 4 samples"),
    Mistake(TAKE, "questions.take(4 prompts * 2 prompts)", "questions.take(4 prompts * 2)", "RLF1005",
            "4 prompts * 2 prompts", "cannot multiply 4 prompts by 2 prompts"),
    Mistake(TAKE, "questions.take(64 / 8 prompts)", "questions.take(64 prompts / 8)", "RLF1005", "64 / 8 prompts",
            "cannot divide the plain number 64 by 8 prompts"),
    Mistake("0.01 * kl", "1 s * kl", "2 * kl", "RLF1005", "1 s", "a factor is a plain number"),
    Mistake(STOP, "stop after 10 samples", "stop after 2 epochs", "RLF1005", "10 samples", "a run stops after a number of steps",
            "`stop after 300 steps`"),
    Mistake("save every 5 steps", "save every 5", "save every 1 step", "RLF1005", "5", "`every` counts steps", "`5 steps`"),
    Mistake("staleness <= 2 steps", "staleness <= 2", "staleness <= 0 steps", "RLF1005", "2", "`staleness` counts steps",
            "`2 steps`"),
    Mistake("memory = 1.5 TiB", "memory = 1.5", "memory = 2 GB", "RLF1005", "1.5", "`memory` is a size such as `64 GiB`"),
    Mistake("pool main = 4 devices", "pool main = 4", "pool main = 2 devices", "RLF1005", "4", "`pool main` counts devices",
            "`4 devices`"),
    # --- 1006 unknown unit
    Mistake("timeout = 5 s", "timeout = 5 sec", "timeout = 5 s", "RLF1006", "5 sec", "unknown unit `sec`"),
    Mistake(TAKE, "questions.take(8 promts)", TAKE, "RLF1006", "8 promts", "unknown unit `promts`", "`prompts`"),
    # --- 1007 wrong type
    Mistake('"chain_sum"', "5", '"chain_sum"', "RLF1007", "5", "`task` is a text in quotes"),
    Mistake("n = group,", 'n = "4",', "n = 4,", "RLF1007", '"4"', "`n` is a whole number"),
    Mistake("n = group,", "n = 1.5 * 3,", "n = 2.0 * 2,", "RLF1007", "1.5 * 3", "`n` is a whole number"),
    Mistake("n = group,", "n = [4],", "n = 4,", "RLF1007", "[4]", "`n` is a whole number"),
    Mistake("group_normalize(score)", "group_normalize(score, std = 1)", "group_normalize(score, std = false)", "RLF1007", "1",
            "`std` is `true` or `false`"),
    Mistake("group_normalize(score)", "group_normalize(samples)", "group_normalize(score)", "RLF1007", "samples",
            "`scores` is one number per sample"),
    Mistake("group_normalize(score)", "group_normalize(ref)", "group_normalize(score)", "RLF1007", "ref",
            "`scores` is one number per sample"),
    Mistake("reference = ref", "reference = adv", "reference = ref", "RLF1007", "adv", "`reference` is one number per response token"),
    Mistake("exact(samples)", "exact(batch)", "exact(samples)", "RLF1007", "batch", "`samples` is rows of samples"),
    Mistake("generate(batch, n", "generate(questions, n", "generate(batch, n", "RLF1007", "questions",
            "`questions` is a data, not a value of this block"),
    Mistake("exact(samples)", "actor(samples)", "exact(samples)", "RLF1007", "actor", "`actor` is a model and cannot be called",
            "`actor.generate(...)`"),
    Mistake('python("rewards:exact"', 'python("rewards.exact"', 'python("a.b:exact"', "RLF1007", '"rewards.exact"',
            "`rewards.exact` is not `module:function`"),
    Mistake("frozen(actor)", "frozen(questions)", "frozen(actor)", "RLF1007", "questions", "`of` is the name of a model"),
    Mistake('frozen(actor)', '"actor"', "frozen(actor)", "RLF1007", '"actor"', "`model first` must be made by a call"),
    Mistake("timeout = 5 s)", "timeout = 5 s, on_error = skip)", "timeout = 5 s, on_error = drop)", "RLF1007", "skip",
            "`on_error` is `fail`, `drop` or `retry(times, then = fail)`"),
    Mistake('python("rewards:exact", timeout = 5 s)', "scorer(questions)", "scorer(puzzles)", "RLF1007", "questions",
            "`questions` brings no scorer of its own", "python("),
    Mistake("loss = " + LOSS, "loss = 3", "loss = -ppo_clip(0.2) / 2 + kl(k1) * 3", "RLF1007", "3", "a loss is a sum of terms",
            ),
    Mistake(ADAM, "0.1", ADAM, "RLF1007", "0.1", "an optimizer is a call"),
    Mistake("place exact on", "place questions on", "place exact on", "RLF1007", "questions", "data is read where it is used"),
    Mistake("place actor, first on main with dp = 4", "place actor, exact on main", "place actor on main", "RLF1007", "exact",
            "Python stages and model stages are placed apart", "two `place` lines", second="actor"),
    Mistake("hosts = 2 * host", "hosts = 2 + 2", "hosts = host", "RLF1007", "2 + 2", "expected a number of devices or hosts"),
    # --- 1009 other rows
    Mistake("score = exact(samples)", "more = actor.generate(batch, n = 4, max_new = 1 token) score = exact(more)",
            "score = exact(samples)", "RLF1009", "adv", "`advantages` was computed on other rows than `samples`", second="samples"),
    Mistake("ref = first.logprobs(samples)", "ref = first.logprobs(actor.generate(batch, max_new = 1 token))",
            "ref = first.logprobs(samples)", "RLF1009", "ref", "`reference` was computed on other rows than `samples`",
            second="samples"),
    # --- 1010 out of range
    Mistake("n = group,", "n = -4,", "n = 4,", "RLF1010", "-4", "`n` must be at least 1, and is -4"),
    Mistake(TAKE, "questions.take(0 prompts)", "questions.take(4 prompts)", "RLF1010", "0 prompts", "at least 1, and is 0"),
    Mistake(TAKE, "questions.take(8.5 prompts)", "questions.take(8.0 prompts)", "RLF1010", "8.5 prompts", "and is 8.5"),
    Mistake(TAKE, "questions.take(-8 prompts)", TAKE, "RLF1010", "-8 prompts", "and is -8"),
    Mistake(TAKE, "questions.take(1e400 prompts)", TAKE, "RLF1010", "1e400 prompts", "this number is too large", note="1e+300"),
    Mistake(TAKE, "questions.take(1" + "0" * 30 + " prompts)", TAKE, "RLF1010", "1" + "0" * 30 + " prompts", "at most"),
    Mistake(TAKE, "questions.take(1" + "0" * 5000 + " prompts)", TAKE, "RLF1010", "1" + "0" * 5000 + " prompts", "too large"),
    Mistake(TAKE, "questions.take(8 prompts / 0)", TAKE, "RLF1010", "0", "division by zero"),
    Mistake("0.01 * kl(k3)", "kl(k3) / 0", "kl(k3) / 2", "RLF1010", "0", "division by zero"),
    Mistake("0.01 * kl(k3)", "1e200 * (1e200 * kl(k3))", "1e2 * (1e2 * kl(k3))", "RLF1010", "kl(k3)", "factor of this loss term"),
    Mistake("ppo_clip(0.2)", "ppo_clip(0)", "ppo_clip(0.2, high = 1e30)", "RLF1010", "0", "`low` must be above 0 and at most 1, and is 0"),
    Mistake(ADAM, "adamw(lr = 1e-4, beta1 = 1)", "adamw(lr = 1e-4, beta1 = 0.99)", "RLF1010", "1", "`beta1` must be below 1"),
    Mistake("timeout = 5 s", "timeout = 0 s", "timeout = 1 us", "RLF1010", "0 s", "`timeout` must be at least 1 us"),
    Mistake("timeout = 5 s", "timeout = 0.1 us", "timeout = 1 h", "RLF1010", "0.1 us", "`timeout` must be at least 1 us"),
    Mistake("seed 7", "seed -1", "seed 0", "RLF1010", "-1", "`seed` must be at least 0, and is -1"),
    Mistake("save every 5 steps", "save every 0 steps", "save every 1 step", "RLF1010", "0 steps", "`every`"),
    Mistake("hosts = 2 * host", "hosts = 0 * host", "hosts = 1 * host", "RLF1010", "0", "and is 0"),
    Mistake("hosts = 2 * host", "hosts = 1000000000 * host", "hosts = 9 * host", "RLF1010", "1000000000", "at most 100000"),
    Mistake("hosts = 2 * host", "hosts = 90000 * host", "hosts = 50000 * host", "RLF1010", "pod",
            "cluster `pod` has 180000 devices, and rlflow plans for 100000 at most"),
    Mistake("alphabet = \"0123456789+=\"", 'alphabet = "aba"', 'alphabet = "ab"', "RLF1010", '"aba"', "`a` more than once"),
    Mistake("alphabet = \"0123456789+=\"", 'alphabet = ""', 'alphabet = "a"', "RLF1010", '""', "no characters"),
    Mistake("architecture = qwen3", "architecture = qwen3, hidden = 12", "architecture = qwen3, hidden = 16", "RLF1010", "12",
            "a head of size 3 is odd", "multiple of 8"),
    Mistake(GENERATE, "actor.generate(batch, n = group, max_new = 16 tokens, temperature = 0)",
            "actor.generate(batch, n = group, max_new = 16 tokens, temperature = 0.1)", "RLF1010", "samples",
            "greedy samples cannot train a policy",
            second="actor.generate(batch, n = group, max_new = 16 tokens, temperature = 0)"),
    # --- 1014, 1015, 1016
    Mistake("actor.train(samples", "first.train(samples", "actor.train(samples", "RLF1014", "first",
            "`first` is frozen and cannot be trained", second="first"),
    Mistake("grade = exact(answers)", "actor.train(answers, advantages = exact(answers), loss = entropy(), optimizer = adamw(1))",
            "grade = exact(answers)", "RLF1014", "actor", "an evaluation cannot train"),
    Mistake("ref = first.logprobs", "ref = actor.logprobs", "ref = first.logprobs", "RLF1016", "ref",
            "the reference is `actor` itself", "frozen(actor)"),
    # --- 2001, 2002
    Mistake(MINI, "minibatch = 12 samples", "minibatch = 8 samples", "RLF2001", "12 samples",
            "a batch of 32 samples does not divide into mini-batches of 12", "8 or 16 samples",
            note="8 prompts x 4 samples"),
    Mistake(MINI, "minibatch = 64 samples", "minibatch = 32 samples", "RLF2001", "64 samples", "a batch of 32 samples", "32 samples"),
    Mistake("architecture = qwen3", "architecture = qwen3, heads = 3", "architecture = qwen3, heads = 8", "RLF2001", "3",
            "`hidden = 64` is not a multiple of `heads = 3`", "63 or 66"),
    Mistake("flow f(group = 4)", "flow f(group = 1)", "flow f(group = 2)", "RLF2002", "score",
            "`group_normalize` compares the samples of one prompt, and here there is 1 per prompt", "at least 2 samples",
            second=GENERATE),
    # --- 3001
    Mistake("pool main", "staleness actor = 3 steps pool main", "staleness actor = 2 steps pool main", "RLF3001",
            "staleness actor = 3 steps", "the schedule lets samples be 3 steps old, and the flow permits 2 for `actor`",
            "allow actor staleness <= 3 steps"),
    Mistake("pool main", "staleness actor = 1 step, admit in_ordr pool main", "staleness actor = 1 step, admit in_order pool main",
            "RLF1001", "in_ordr", "unknown admission rule `in_ordr`", "`in_order`"),
    Mistake("pool main", "trigger samples at 175% pool main", "trigger samples at 75% pool main", "RLF1005", "175%",
            "a trigger is a share above 0% and at most 100%"),
    Mistake("pool main", "trigger sample at 75% pool main", "trigger samples at 75%, carry partial pool main", "RLF1001", "sample",
            "unknown value `sample`", "`samples`"),
    Mistake("pool main", "trigger samples at 75%, carry on_ pool main", "trigger samples at 75%, carry finish pool main",
            "RLF1001", "on_", "`carry` is `partial`, `finish` or `nothing`"),
]  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: f"{case.code}-{case.bad[:40]}")
def test_mistake(case: Mistake, problems: Any) -> None:
    found = problems((case.text, case.bad))
    assert [d.code for d in found] == [case.code], [d.message for d in found]
    (error,) = found
    assert case.says in error.message
    assert error.span.text == case.place
    assert all(case.help in line for line in error.help[:1])
    assert bool(error.help) == bool(case.help)
    assert case.note in " ".join(error.notes)
    if case.second is not None:
        others = [label.span.text for label in error.labels if not label.primary]
        assert others == [case.second]


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: f"{case.code}-{case.bad[:40]}")
def test_twin_compiles(case: Mistake, problems: Any) -> None:
    assert [d.message for d in problems((case.text, case.good)) if d.severity == "error"] == []


def test_the_flow_itself_is_sound(problems: Any) -> None:
    assert problems() == []


# --- mistakes that need more than one edit ---------------------------------------------------------------------------


def test_batch_100_minibatch_32(problems: Any) -> None:
    """Field report A7: both numbers, the nearest sizes on both sides, and the nearest batches."""
    edits = ((TAKE, "questions.take(25 prompts)"), (MINI, "minibatch = 32 samples"))
    (error,) = problems(*edits)
    assert error.code == "RLF2001"
    assert error.message == "a batch of 100 samples does not divide into mini-batches of 32"
    assert error.labels[0].text == "100 = 3 x 32 + 4"
    assert error.help == ("nearest that divide: 25 or 50 samples; or take 24 or 32 prompts",)
    for prompts in (24, 32):
        assert problems((TAKE, f"questions.take({prompts} prompts)"), edits[1]) == []
    for size in (25, 50):
        assert problems(edits[0], (MINI, f"minibatch = {size} samples")) == []


def test_enormous_batch_is_answered_at_once(problems: Any) -> None:
    edits = ((TAKE, "questions.take(1000000000000000003 prompts)"), (MINI, "minibatch = 500000000000000009 samples"))
    (error,) = problems(*edits)
    assert error.code == "RLF2001"


def test_reference_without_kl_is_a_warning(problems: Any) -> None:
    (warning,) = problems((LOSS, "ppo_clip(0.2)"))
    assert (warning.code, warning.severity, warning.span.text) == ("RLF1013", "warning", "ref")
    assert "neither loaded nor run" in warning.help[0]


@pytest.mark.parametrize(
    ("edit", "place", "says"),
    [
        (("ref = first", "unused = exact(samples) ref = first"), "unused", "`unused` is never used"),
        (("ref = first", "exact(samples) ref = first"), "exact(samples)", "the result of this call is not used"),
        (("rows = puzzles.all()", "rows = questions.all()"), "puzzles", "data `puzzles` is never used"),
        (("grade = exact(answers)", ""), "answers", "`answers` is never used"),
        (("model first", "model other = frozen(actor)\n  model first"), "other", "model `other` is never used"),
    ],
)
def test_unused(edit: tuple[str, str], place: str, says: str, problems: Any) -> None:
    (warning,) = problems(edit)
    assert (warning.code, warning.severity) == ("RLF1013", "warning")
    assert warning.span.text == place
    assert says in warning.message


def test_named_training_and_score_at_the_end_of_an_evaluation_are_used(problems: Any) -> None:
    assert problems(("actor.train(", "update = actor.train(")) == []


# --- one mistake, one error ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edit",
    [
        ("tiny(architecture", "tiny(arkitecture"),
        ('jsonl("a.jsonl"', "jsonl(5"),
        (TAKE, "questions.take(8)"),
        (GENERATE, "actor.generate(batch)"),
        ("n = group, max_new = 16", "n = grop, max_new = 16"),
        ("exact(samples)", "exact(sample)"),
        ("python(", "pyton("),
        ("pool main = 4 devices", "pool main = 4"),
        (HOST, "host = 2 * ascend_911b"),
        ("frozen(actor)", "frozen()"),
    ],
    ids=lambda edit: edit[1],
)
def test_errors_do_not_cascade(edit: tuple[str, str], problems: Any) -> None:
    """Everything in the flow depends on what is broken here; only the break is reported, without warnings."""
    assert len(problems(edit)) == 1


def test_independent_mistakes_are_all_reported(problems: Any) -> None:
    found = problems(
        (TAKE, "questions.take(8)"),
        ("adamw(lr = 1e-4)", "adam(lr = 1e-4)"),
        (STOP, "stop after 5 s"),
        ("frozen(actor)", "frozen(a)"),
    )
    assert sorted(d.code for d in found) == ["RLF1001", "RLF1001", "RLF1005", "RLF1005"]
    assert all(d.severity == "error" for d in found)


def test_every_problem_of_one_call_is_reported(problems: Any) -> None:
    found = problems((GENERATE, "actor.generate(batch, n = 0, max_new = 16, temprature = 1)"))
    assert [d.code for d in found] == ["RLF1003", "RLF1010", "RLF1005"]
