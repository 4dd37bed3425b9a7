"""Programs whose values have the types that their readers want, made from the tables of signatures; some then get odd
values put in. Everything comes from one `random.Random`, so hypothesis and the fuzzer can both drive it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from fuzz_mutations import starts_with_names

from rlflow.diagnostics import SourceFile, Span
from rlflow.frontend import parameters as accepts
from rlflow.frontend.parameters import REQUIRED, Parameter, Signature
from rlflow.frontend.signatures import DECLARATIONS, FUNCTIONS, LOSSES, METHODS, OPTIMIZERS
from rlflow.grammar import nodes
from rlflow.ir.losses import NEEDS

FILE = SourceFile("typed.rlflow", "")
AT = Span(FILE, 0, 0)
GIVES = {
    "generate": "samples", "best_of": "samples", "best_worst": "pairs", "mixed_groups": "samples",
    "logprobs": "per token", "values": "per token", "kl_reward": "per token", "gae": "per token", "returns": "per token",
}  # fmt: skip
"""What a stage gives; all others give one number per sample."""
ROWS = ("samples", "pairs")
SIZES = {
    "hidden": (64, 64, 64, 48), "heads": (4, 8), "kv_heads": (2, 4), "intermediate": (64, 128), "layers": (1, 2), "n": (2, 4, 4, 1),
    "turns": (1,), "context": (128, 256, 256, 256, 4), "keep": (1, 2), "max_new": (4, 4, 8), "mean_new": (2, 4), "limit": (4,), "minibatch": (4, 8, 3),
}  # fmt: skip
"""Values of parameters that must fit each other; most do."""
ALWAYS = frozenset({"n"})
FILTERS = frozenset({"best_of", "best_worst", "mixed_groups"})


@dataclass(frozen=True)
class Value:
    """A value of the block: what it is, and the samples that it belongs to."""

    name: str
    what: str
    rows: str
    normalised: bool = False


def name(word: str) -> nodes.Name:
    return nodes.Name(word, AT)


def call(function: str, *arguments: nodes.Argument) -> nodes.Call:
    owner, _, method = function.rpartition(".")
    base: nodes.Expr = nodes.Attribute(name(owner), nodes.Ident(method, AT), AT) if owner else name(method)
    return nodes.Call(base, arguments, AT)


def given(key: str | None, value: nodes.Expr) -> nodes.Argument:
    return nodes.Argument(None if key is None else nodes.Ident(key, AT), value, AT)


def quantity(value: int | float, unit: str) -> nodes.Quantity:
    return nodes.Quantity(value, unit, AT)


class Maker:
    """One program. `odd` are expressions that replace a share of all arguments."""

    def __init__(self, chance: random.Random, odd: Sequence[nodes.Expr] = (), share: float = 0.0) -> None:
        self._chance = chance
        self._odd = odd
        self._share = share
        self._values: list[Value] = []
        self._body: list[nodes.Statement] = []
        self._group = 1

    def program(self) -> nodes.Program:
        items = [*self._declarations(), nodes.Step(self._step(), AT)]
        if self._chance.random() < 0.5:
            every = quantity(self._chance.randint(1, 9), "steps") if self._chance.random() < 0.7 else None
            items.append(nodes.Evaluate(nodes.Ident("held", AT), every, self._evaluation(), AT))
        if self._chance.random() < 0.5:
            items.append(
                nodes.Stop(quantity(self._chance.randint(1, 99), self._chance.choice(["steps", "epochs"])), AT)
            )
        self._chance.shuffle(items)
        return nodes.Program(FILE, (nodes.Flow(nodes.Ident("f", AT), (), tuple(items), AT),))

    # --- declarations ---------------------------------------------------------------------------------------------

    def _declarations(self) -> list[nodes.FlowItem]:
        made = [
            ("data", "sums", self._declared("data", "reasoning_gym")),
            ("model", "actor", self._declared("model", "tiny")),
        ]
        for word, of in (("frozen", "first"), ("value", "critic")):
            made.append(("model", of, self._declared("model", word)))
        made.append(("model", "teacher", self._declared("model", "preset")))
        made.append(("reward", "exact", self._declared("reward", self._chance.choice(["python", "scorer"]))))
        made.append(("environment", "tool", self._declared("environment", "python")))
        return [nodes.Declaration(kind, nodes.Ident(word, AT), value, AT) for kind, word, value in made]

    def _declared(self, kind: str, word: str) -> nodes.Call:
        return call(word, *self._arguments(DECLARATIONS[kind][word], {}, {"data": "sums", "model": "actor"}))

    # --- blocks ---------------------------------------------------------------------------------------------------

    def _step(self) -> tuple[nodes.Statement, ...]:
        self._values, self._body = [], []
        self._sample("sums.take", given(None, quantity(self._chance.choice([1, 4, 8, 12]), "prompts")))
        for _ in range(self._chance.randint(0, 5)):
            self._stage(self._chance.choice([*FUNCTIONS, "logprobs", "values", "exact", "generate"]))
        trained = self._chance.choice(["actor", "actor", "critic"])
        self._train(trained)
        return tuple(self._body)

    def _evaluation(self) -> tuple[nodes.Statement, ...]:
        self._values, self._body = [], []
        self._sample("sums.all")
        self._stage("exact")
        return tuple(self._body)

    def _sample(self, take: str, *arguments: nodes.Argument) -> None:
        self._assign(Value("batch", "prompts", ""), call(take, *arguments))
        self._stage("generate")
        self._stage("exact")

    def _assign(self, value: Value, made: nodes.Expr) -> Value:
        self._body.append(nodes.Assign(nodes.Ident(value.name, AT), made, AT))
        self._values.append(value)
        return value

    def _pick(self, what: Sequence[str], rows: str | None = None) -> Value | None:
        found = [v for v in self._values if v.what in what and rows in (None, v.rows)]
        return self._chance.choice(found) if found else None

    def _stage(self, word: str, rows: str | None = None) -> Value | None:
        """A new value by this stage, of inputs that fit; None where there are none."""
        owner = {"logprobs": self._chance.choice(["first", "teacher"]), "values": "critic", "generate": "actor"}.get(
            word
        )
        signature = METHODS["model"][word] if owner else FUNCTIONS.get(word)
        inputs: dict[str, Value] = {}
        if word == "generate":
            prompts = self._pick(["prompts"])
            assert prompts is not None
            inputs["prompts"] = prompts
            self._group = self._chance.choice([1, 2, 4, 4])
        else:
            samples = self._pick(ROWS, rows)
            if samples is None:
                return None
            for parameter in () if signature is None else signature.parameters:
                wanted = _kinds(parameter)
                if wanted and (parameter.default is REQUIRED):
                    value = samples if wanted == ROWS else self._pick(wanted, samples.rows)
                    if value is None and "per token" in wanted:
                        value = self._stage("values" if parameter.name == "values" else "logprobs", samples.rows)
                    if value is None:
                        return None
                    inputs[parameter.name] = value
            inputs.setdefault("samples", samples)
        number = f"v{len(self._body)}"
        what = GIVES.get(word, "per sample")
        own_rows = number if word in FILTERS or word == "generate" else inputs["samples"].rows
        if signature is None:
            made = call(word, given(None, name(inputs["samples"].name)))
        else:
            made = call(
                f"{owner}.{word}" if owner else word, *self._arguments(signature, inputs, {"environment": "tool"})
            )
        return self._assign(Value(number, what, own_rows), made)

    def _train(self, model: str) -> None:
        samples = self._pick(ROWS)
        assert samples is not None
        terms = ["value_clip"] if model == "critic" else [w for w in LOSSES if w != "value_clip"]
        kinds = self._chance.sample(terms, min(len(terms), self._chance.choice([1, 1, 2])))
        if samples.what == "pairs" and model == "actor" and self._chance.random() < 0.8:
            kinds = ["dpo"]
        inputs = {"samples": samples}
        for need in dict.fromkeys(need for kind in kinds for need in NEEDS[kind]):
            maker = {"advantages": "group_normalize", "returns": "returns", "values": "values"}.get(need, "logprobs")
            if maker == "group_normalize" and self._pick(["per sample"], samples.rows) is None:
                self._stage("exact", samples.rows)
            if maker == "returns":
                self._stage("values", samples.rows)
            value = self._stage(maker, samples.rows)
            if value is not None:
                inputs[need] = value
        loss: nodes.Expr | None = None
        for kind in kinds:
            term: nodes.Expr = call(kind, *self._arguments(LOSSES[kind], {}, {}))
            term = nodes.Binary("*", nodes.Number(self._chance.choice([0, 0.5, 2]), AT), term, AT)
            loss = term if loss is None else nodes.Binary(self._chance.choice("+-"), loss, term, AT)
        assert loss is not None
        made = call(f"{model}.train", *self._arguments(METHODS["model"]["train"], inputs, {}, loss))
        self._body.append(nodes.CallStatement(made, AT))

    # --- arguments ------------------------------------------------------------------------------------------------

    def _arguments(
        self, signature: Signature, inputs: dict[str, Value], names: dict[str, str], loss: nodes.Expr | None = None
    ) -> list[nodes.Argument]:
        out = []
        for parameter in signature.parameters:
            value: nodes.Expr | None
            if parameter.name in inputs:
                value = name(inputs[parameter.name].name)
            elif _kinds(parameter) or (
                parameter.default is not REQUIRED and parameter.name not in ALWAYS and self._chance.random() < 0.8
            ):
                continue
            else:
                value = loss if isinstance(parameter.accepts, accepts.Loss) else self._constant(parameter, names)
            if value is None:
                continue
            if self._odd and self._chance.random() < self._share:
                value = self._chance.choice(self._odd)
            out.append(given(parameter.name, value))
        return self._with_experts(out) if any(p.name == "experts" for p in signature.parameters) else out

    def _with_experts(self, arguments: list[nodes.Argument]) -> list[nodes.Argument]:
        """Experts where the architecture has them, mostly: else most programs would end with this error."""
        if self._chance.random() < 0.05:
            return arguments
        words = [a.value.id for a in arguments if isinstance(a.value, nodes.Name) and a.name is not None]
        kept = [a for a in arguments if a.name is None or a.name.text not in ("experts", "experts_per_token")]
        return [*kept, given("experts", nodes.Number(4, AT))] if "qwen3_moe" in words else kept

    def _constant(self, parameter: Parameter, names: dict[str, str]) -> nodes.Expr | None:
        known = {"task": "chain_sum", "alphabet": "0123456789+-=. ", "function": "rewards:exact_match", "name": "qwen3_8b",
                 "target": "environments:Calculator"}  # fmt: skip
        match parameter.accepts:
            case accepts.Text():
                return nodes.String(known[parameter.name], AT) if parameter.name in known else None
            case accepts.Flag():
                return nodes.Constant(self._chance.random() < 0.5, AT)
            case accepts.Whole(least, most):
                if parameter.name in SIZES:
                    return nodes.Number(self._chance.choice(SIZES[parameter.name]), AT)
                return nodes.Number(self._chance.randint(least, min(most, least + 9)), AT)
            case accepts.Real(least, most):
                return nodes.Number(self._chance.choice([(least or 0.0) + 0.3, most if most is not None else 2.0]), AT)
            case accepts.Count(unit, least):
                sizes = SIZES.get(parameter.name, (1, 2, 4))
                return quantity(max(least, self._chance.choice(sizes)), unit)
            case accepts.Duration():
                return quantity(self._chance.randint(1, 60), "s")
            case accepts.Word(choices):
                return name(self._chance.choice(choices))
            case accepts.Reference(kind):
                return name(names[kind]) if kind in names else None
            case accepts.Optimizer():
                word = self._chance.choice(list(OPTIMIZERS))
                return call(word, *self._arguments(OPTIMIZERS[word], {}, {}))
        return None


def _kinds(parameter: Parameter) -> tuple[str, ...]:
    """What a value of the block must be to fit this parameter; empty: it takes none."""
    match parameter.accepts:
        case accepts.Rows("prompt"):
            return ("prompts",)
        case accepts.Rows():
            return ROWS
        case accepts.PerRow():
            return ("per sample",)
        case accepts.PerToken():
            return ("per token",)
        case accepts.Column():
            return ("per sample", "per token")
    return ()


def typed_program(chance: random.Random, odd: Sequence[nodes.Expr] = (), share: float = 0.0) -> nodes.Program:
    """A program for which most checks pass, or with odd values in a share of its arguments."""
    program = Maker(chance, odd, share).program()
    assert starts_with_names(program)
    return program
