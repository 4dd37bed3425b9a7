"""`data`, `model` and `reward` declarations to the sources of the intermediate form."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.cluster import presets
from rlflow.cluster.presets.architecture import Architecture
from rlflow.cluster.presets.from_config import facts_of_config, facts_of_tiny
from rlflow.cluster.shape import ModelShape
from rlflow.diagnostics import Diagnostic, Label
from rlflow.frontend.adapters import Written, adapter, check_targets
from rlflow.frontend.bind import Bound, Scope, bind
from rlflow.frontend.constants import Poison, Reporter
from rlflow.frontend.data_files import GYM_ROW, Row, file_data
from rlflow.frontend.derived_models import derived_source
from rlflow.frontend.parameters import Adapter, OnError, Parameter, Reference
from rlflow.frontend.python_names import check_parameters, find_python
from rlflow.frontend.signatures import DECLARATIONS, FUNCTIONS, ON_ERRORS
from rlflow.grammar import nodes
from rlflow.ir import ops
from rlflow.ir.flow import Data, Environment, Model, Reward


class Declarations:
    """The declared names of one flow, in order."""

    def __init__(self, scope: Scope, report: Reporter, base_dir: Path | None) -> None:
        self._scope = scope
        self._report = report
        self._base_dir = base_dir
        self.data: dict[str, Data] = {}
        self.models: dict[str, Model] = {}
        self.rewards: dict[str, Reward] = {}
        self.environments: dict[str, Environment] = {}
        self.poisoned: dict[str, str] = {}
        """Name to kind of declarations with errors; using them is not reported again."""
        self.announced: dict[str, nodes.Declaration] = {}
        """All declarations of the flow, also those not checked yet."""
        self.problems: dict[str, tuple[Diagnostic, ...]] = {}
        """What was reported about the poisoned ones."""
        self.reward_files: list[Path] = []
        """Python files beside the source that rewards come from."""
        self._spans: dict[str, nodes.Ident] = {}
        self._rows: dict[str, Row | None] = {}
        """A row with the columns of every data set; None where they are not known."""

    def kind_of(self, name: str) -> str | None:
        """data, model or reward; None for an unknown name."""
        if name in self._spans:
            tables: dict[str, Mapping[str, object]] = {
                "data": self.data,
                "model": self.models,
                "reward": self.rewards,
                "environment": self.environments,
            }
            for kind, table in tables.items():
                if name in table:
                    return kind
            return self.poisoned.get(name)
        return None

    def names(self, kind: str | None = None) -> list[str]:
        return [name for name in self._spans if kind is None or self.kind_of(name) == kind]

    def context_of(self, model: str) -> int | None:
        """Tokens of the model's longest sequence, where that is known without loading it."""
        source = self.models[model].source
        while isinstance(source, ops.FrozenModel | ops.ValueModel):
            source = self.models[source.of].source
        if isinstance(source, ops.TinyModel):
            return source.context
        if isinstance(source, ops.PresetModel):
            return int(presets.model(source.name)["max_position_embeddings"])
        if isinstance(source, ops.HfModel):
            found = (self._config(source.path) or {}).get("max_position_embeddings")
            return found if isinstance(found, int) else None
        return None

    def architecture_of(self, model: str) -> Architecture | None:
        """The architecture of a model, where it is known without loading the model."""
        source = self.models[model].source
        while isinstance(source, ops.FrozenModel | ops.ValueModel):
            source = self.models[source.of].source
        facts: Mapping[str, Any] | None = None
        if isinstance(source, ops.TinyModel):
            vocabulary = len(source.alphabet) + 2  # the end token and the padding token
            facts = facts_of_tiny(
                source.architecture,
                vocabulary,
                source.hidden,
                source.layers,
                source.heads,
                source.kv_heads,
                source.intermediate,
                source.context,
                source.experts,
                source.experts_per_token,
            )
        elif isinstance(source, ops.PresetModel):
            facts = presets.model(source.name)
        elif isinstance(source, ops.HfModel | ops.RewardModel):
            config = self._config(source.path)
            facts = None if config is None else facts_of_config(config)
        return None if facts is None else Architecture(model, facts)

    def shape_of(self, model: str) -> ModelShape | None:
        """What sharding must divide, where that is known without loading the model."""
        source = self.models[model].source
        while isinstance(source, ops.FrozenModel | ops.ValueModel):
            source = self.models[source.of].source
        if isinstance(source, ops.TinyModel):
            dense, sparse = (0, source.intermediate) if source.experts else (source.intermediate, 0)
            return ModelShape(source.layers, source.heads, source.kv_heads, source.experts, dense, sparse)
        if isinstance(source, ops.PresetModel):
            return ModelShape.from_preset(presets.model(source.name))
        if isinstance(source, ops.HfModel | ops.RewardModel):
            config = self._config(source.path)
            return None if config is None else ModelShape.from_config(config)
        return None

    def _config(self, path: str) -> dict[str, Any] | None:
        """The config.json of a checkpoint folder beside the file, if it is there."""
        if self._base_dir is None:
            return None
        try:
            config = json.loads((self._base_dir / path / "config.json").read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return config if isinstance(config, dict) else None

    def declared_at(self, name: str) -> nodes.Ident:
        return self._spans[name]

    def add(self, declaration: nodes.Declaration) -> None:
        """Check one declaration and enter it; problems are reported, never raised."""
        name = declaration.name.text
        if name in self._spans:
            self._report.error(
                "RLF1002",
                f"`{name}` is declared twice",
                Label(declaration.name.span, "again here"),
                Label(self._spans[name].span, "first here", primary=False),
            )
            return
        self._spans[name] = declaration.name
        taken = "parameter of the flow" if name in self._scope.constants else ""
        if declaration.kind == "reward" and name in FUNCTIONS:
            taken = "function of the language"
        if taken:
            self._report.error("RLF1002", f"`{name}` is already a {taken}", Label(declaration.name.span))
            self.poisoned[name] = declaration.kind
            return
        before = len(self._report.diagnostics)
        try:
            self._enter(declaration)
        except Poison:
            self.poisoned[name] = declaration.kind
            self.problems[name] = tuple(self._report.diagnostics[before:])

    def _enter(self, declaration: nodes.Declaration) -> None:
        kind, name, value = declaration.kind, declaration.name.text, declaration.value
        table = DECLARATIONS[kind]
        if not (isinstance(value, nodes.Call) and isinstance(value.function, nodes.Name)):
            raise self._report.error(
                "RLF1007",
                f"`{kind} {name}` must be made by a call",
                Label(value.span, f"expected {' or '.join(f'`{word}(...)`' for word in table)}"),
            )
        word = value.function.id
        if word not in table:
            raise self._report.unknown(f"kind of {kind}", word, Label(value.function.span), sorted(table))
        bound = bind(value, table[word], self._scope, self._report, self._special)
        span = declaration.span
        if kind == "data":
            self.data[name] = Data(name, self._data(name, word, bound), span)
        elif kind == "model":
            source = self._model(word, bound)
            trainable = not isinstance(source, ops.FrozenModel | ops.RewardModel)
            self.models[name] = Model(name, source, trainable, span)
            written: Written | None = bound.values.get("lora")
            if written is not None:
                try:
                    check_targets(written, name, self.architecture_of(name), self._report)
                except Poison:
                    del self.models[name]
                    raise
        elif kind == "environment":
            self._python(bound, "target", "Class")
            self.environments[name] = Environment(
                name, ops.PythonEnvironment(target=bound["target"], timeout_us=bound["timeout"]), span
            )
        else:
            self.rewards[name] = Reward(name, self._reward(word, bound), span)

    def _special(self, parameter: Parameter, expr: nodes.Expr) -> Any:
        if isinstance(parameter.accepts, OnError):
            return self._on_error(expr)
        if isinstance(parameter.accepts, Adapter):
            return adapter(expr, self._scope, self._report)
        return self.reference(parameter, expr)

    def reference(self, parameter: Parameter, expr: nodes.Expr) -> str:
        """The declared name that an argument gives; raises Poison after reporting."""
        assert isinstance(parameter.accepts, Reference)
        kind = parameter.accepts.kind
        if not isinstance(expr, nodes.Name):
            raise self._report.error("RLF1007", f"`{parameter.name}` is the name of a {kind}", Label(expr.span))
        if self.kind_of(expr.id) is None:
            if expr.id in self.announced:  # sources come before what is made from them, unless they form a circle
                raise self._report.error(
                    "RLF1007",
                    f"`{expr.id}` is made from itself: {' -> '.join(f'`{name}`' for name in self._circle(expr.id))}",
                    Label(expr.span),
                    help=("one of them must be a model of its own, such as `hf(...)`",),
                )
            raise self._report.unknown(kind, expr.id, Label(expr.span), self.names(kind))
        if expr.id in self.poisoned:
            raise Poison()
        if self.kind_of(expr.id) != kind:
            raise self._report.error(
                "RLF1007", f"`{parameter.name}` is the name of a {kind}", Label(expr.span, f"a {self.kind_of(expr.id)}")
            )
        return expr.id

    def _circle(self, start: str) -> list[str]:
        """The names from `start` along what each is made from, back to it."""
        path, name = [start], start
        while len(path) <= len(self.announced):
            value = self.announced[name].value
            of = value.arguments[0].value if isinstance(value, nodes.Call) and value.arguments else None
            if not isinstance(of, nodes.Name) or of.id not in self.announced:
                break
            name = of.id
            path.append(name)
            if name == start:
                break
        return path

    def _on_error(self, expr: nodes.Expr) -> tuple[int, str]:
        """How often to try again, and what to do then."""
        if isinstance(expr, nodes.Name) and expr.id in ("fail", "drop"):
            return 0, expr.id
        if isinstance(expr, nodes.Call) and isinstance(expr.function, nodes.Name) and expr.function.id in ON_ERRORS:
            bound = bind(expr, ON_ERRORS[expr.function.id], self._scope, self._report, _nothing_special)
            return bound["times"], bound["then"]
        raise self._report.error(
            "RLF1007", "`on_error` is `fail`, `drop` or `retry(times, then = fail)`", Label(expr.span)
        )

    def _data(self, name: str, word: str, bound: Bound) -> ops.DataSource:
        self._rows[name] = None
        if word == "reasoning_gym":
            self._rows[name] = GYM_ROW
            extra = tuple(sorted(bound.extra.items()))
            return ops.GymData(
                task=bound["task"],
                size=bound["size"],
                seed=bound["seed"],
                options=extra,
                shuffle=bound["shuffle"],
                system=bound["system"],
                too_long=bound["too_long"],
                prompt_tokens=bound["prompt_tokens"],
            )
        source, self._rows[name] = file_data(word, bound, self._base_dir, self._report)
        return source

    def _model(self, word: str, bound: Bound) -> ops.ModelSource:
        if word in ("frozen", "value"):
            return derived_source(word, bound, self.models, self._spans, self._report)
        if word == "preset":
            if bound["name"] not in presets.model_names():
                label = Label(bound.spans["name"])
                raise self._report.unknown("model preset", bound["name"], label, list(presets.model_names()))
            return ops.PresetModel(name=bound["name"], lora=_lora(bound))
        if word == "reward_model":
            return ops.RewardModel(path=bound["path"], compute=bound["compute"])
        if word == "hf":
            return ops.HfModel(path=bound["path"], compute=bound["compute"], lora=_lora(bound))
        values = {**bound.values, "lora": _lora(bound)}
        self._check_alphabet(bound)
        for larger, smaller in (("hidden", "heads"), ("heads", "kv_heads")):
            if values[larger] % values[smaller]:
                self._report.error(
                    "RLF2001",
                    f"`{larger} = {values[larger]}` is not a multiple of `{smaller} = {values[smaller]}`",
                    Label(bound.spans.get(larger) or bound.spans.get(smaller) or bound.spans["alphabet"]),
                    help=(f"nearest: {nearest_multiples(values[larger], values[smaller])}",),
                )
                raise Poison()
        if values["hidden"] // values["heads"] % 2:
            raise self._report.error(
                "RLF1010",
                f"a head of size {values['hidden'] // values['heads']} is odd, and rotary positions need pairs",
                Label(bound.spans.get("hidden") or bound.spans.get("heads") or bound.spans["alphabet"]),
                help=(f"`hidden` must be a multiple of {2 * values['heads']}",),
            )
        return ops.TinyModel(**{**values, **self._experts(bound)})

    def _experts(self, bound: Bound) -> dict[str, int]:
        """`experts` and `experts_per_token` of a tiny model: 0 for a dense one."""
        experts, chosen = bound["experts"], bound["experts_per_token"]
        where = bound.spans.get("experts_per_token") or bound.spans.get("experts") or bound.spans["architecture"]
        if bound["architecture"] != "qwen3_moe":
            given = next((name for name in ("experts", "experts_per_token") if bound[name] is not None), None)
            if given is not None:
                raise self._report.error(
                    "RLF1010",
                    f"`{given} = {bound[given]}`: a model of `{bound['architecture']}` has no experts",
                    Label(bound.spans[given]),
                    help=("`tiny(qwen3_moe, ...)` has them",),
                )
            return {"experts": 0, "experts_per_token": 0}
        if experts is None:
            raise self._report.error(
                "RLF1010", "`qwen3_moe` needs `experts`", Label(where), help=("for example `experts = 8`",)
            )
        chosen = min(2, experts) if chosen is None else chosen
        if chosen > experts:
            raise self._report.error(
                "RLF1010",
                f"`experts_per_token = {chosen}` is more than the {experts} experts of a layer",
                Label(where),
                help=(f"at most {experts}",),
            )
        return {"experts": experts, "experts_per_token": chosen}

    def _check_alphabet(self, bound: Bound) -> None:
        alphabet: str = bound["alphabet"]
        label = Label(bound.spans["alphabet"])
        if not alphabet:
            raise self._report.error("RLF1010", "`alphabet` has no characters", label)
        repeated = sorted({char for char in alphabet if alphabet.count(char) > 1})
        if repeated:
            raise self._report.error(
                "RLF1010", f"`alphabet` has {', '.join(f'`{char}`' for char in repeated)} more than once", label
            )

    def _reward(self, word: str, bound: Bound) -> ops.RewardSource:
        retries, on_error = bound["on_error"]
        rules = {"timeout_us": bound["timeout"], "retries": retries, "on_error": on_error}
        if word == "scorer":
            data = self.data[bound["data"]]
            if not isinstance(data.source, ops.GymData):
                raise self._report.error(
                    "RLF1007",
                    f"`{data.name}` brings no scorer of its own",
                    Label(bound.spans["data"], "only reasoning_gym data does"),
                    help=('write a reward function: `python("rewards:name")`',),
                )
            return ops.DatasetScorer(data=data.name, **rules)
        function = self._python(bound, "function", "function")
        if function is not None:
            check_parameters(function, list(self._rows.values()), bound, self._report)
        return ops.PythonReward(function=bound["function"], **rules)

    def _python(self, bound: Bound, argument: str, what: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        found = find_python(bound, argument, what, self._base_dir, self._report)
        if found is None:
            return None
        if found.file not in self.reward_files:
            self.reward_files.append(found.file)
        return found.function


def _lora(bound: Bound) -> ops.Lora | None:
    written: Written | None = bound["lora"]
    return None if written is None else written.lora


def _nothing_special(parameter: Parameter, expr: nodes.Expr) -> Any:
    raise AssertionError(f"{parameter.name} takes a constant")


def nearest_divisors(of: int, near: int) -> tuple[int, int]:
    """The divisors of `of` on both sides of `near`; 1 and `of` where none is found within a million."""
    near, reach = min(near, of), 1_000_000
    below = next((d for d in range(near, max(1, near - reach) - 1, -1) if of % d == 0), 1)
    above = next((d for d in range(near, min(of, near + reach) + 1) if of % d == 0), of)
    return below, above


def nearest_multiples(value: int, of: int) -> str:
    """The multiples of `of` on both sides of `value`: `96 or 128`."""
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{below + of}"
