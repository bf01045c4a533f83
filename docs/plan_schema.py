"""``docs/plan-schema.md`` and ``docs/plan-schema.json``: what ``twostroke plan … --json`` prints, key by key.

Everything is read from the annotations of the classes that the documents are made of (``twostroke.core.described``); only what
a command adds to its plan is described here. tests/docs/test_plan_schema.py validates real documents of every kind.
"""

from __future__ import annotations

import re
import typing
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union

from twostroke.core.described import LeftOut, keys_of
from twostroke.planner.choosing.comparison import Comparison
from twostroke.planner.choosing.crossover import Crossover
from twostroke.planner.choosing.search import Search
from twostroke.planner.choosing.server_settings import ServerChoice
from twostroke.planner.choosing.size_ladder import Rung
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.money.cost import Cost, DeviceRate, TokenPrices
from twostroke.planner.serving.plan import ServingPlan
from twostroke.planner.serving.under_load import LatencyTable, Load, Loaded
from twostroke.planner.training.plan import TrainingPlan
from twostroke.planner.truth.document import PLAN_SCHEMA, Kind
from twostroke.planner.truth.intervals import Interval
from twostroke.planner.truth.record import Term


class Common:
    """In every document."""

    schema: Annotated[str, PLAN_SCHEMA]
    kind: Annotated[Kind, "train, serve, compare, crossover or search"]
    subject: Annotated[str, "the model or recipe that was named"]
    terms: Annotated[list[Term], "with --explain: every number's formula, numbers and source", LeftOut]


class Train:
    """Beside a training plan."""

    intervals: Annotated[dict[str, Interval], "each prediction with its range"]
    ranking: Annotated[list[Rung], "models that the budget could train; empty for a given model"]


class Serve:
    """Beside a serving plan."""

    intervals: Annotated[dict[str, Interval], "each prediction with its range"]
    latency_table: Annotated[LatencyTable, "around the plan's own batch and context"]
    simulated: Annotated[
        Loaded, "users who each ask again when answered, as many as the batch; not with --no-simulation", LeftOut
    ]
    load: Annotated[Load, "with --rate or a limit", LeftOut]
    choice: Annotated[ServerChoice, "of our engine's server, with a limit or --mode", LeftOut]


class CrossoverOfModel:
    """Beside a crossover."""

    hardware: Annotated[Hardware, "on what, where a model was planned", LeftOut]
    training_cost: Annotated[Cost, "of the final run, where it was computed", LeftOut]
    worked_hour: Annotated[DeviceRate, "$ of an hour that serves", LeftOut]
    utilisation: Annotated[float, "share of the time that the server works", LeftOut]
    token_prices: Annotated[TokenPrices, "of the own server", LeftOut]
    notes: Annotated[list[str], "what to bear in mind"]


class Searches:
    """Of a search."""

    searches: Annotated[dict[str, Search], "by phase: train, serve"]


DOCUMENTS: dict[Kind, tuple[type, ...]] = {
    "train": (TrainingPlan, Train),
    "serve": (ServingPlan, Serve),
    "compare": (Comparison,),
    "crossover": (Crossover, CrossoverOfModel),
    "search": (Searches,),
}
"""The classes whose keys a document has beside ``Common``."""


class Field(NamedTuple):
    """One key: its type, what it is, and whether it is always there."""

    shape: Any
    unit: str
    meaning: str
    required: bool

    @property
    def text(self) -> str:
        return f"{self.unit} {self.meaning}".strip()


def fields_of(cls: type) -> dict[str, Field]:
    """The keys of a document of ``cls``. Raises TypeError for a class without any."""
    return {
        key.name: Field(_left(key.shape) if key.left_out else key.shape, key.unit, key.meaning, not key.left_out)
        for key in keys_of(cls)
    }


def _left(shape: Any) -> Any:
    """``X | None`` without the None: a key that is left out is never null."""
    left = tuple(arg for arg in typing.get_args(shape) if arg is not NoneType)
    return Union[left] if NoneType in typing.get_args(shape) else shape  # noqa: UP007


def document_fields(kind: Kind) -> dict[str, Field]:
    found: dict[str, Field] = {}
    for cls in (Common, *DOCUMENTS[kind]):
        found |= fields_of(cls)
    return found


# -- types ----------------------------------------------------------------------------------------------------------------

SIMPLE: dict[Any, tuple[str, dict[str, Any]]] = {
    float: ("number", {"type": "number"}),
    int: ("integer", {"type": "integer"}),
    str: ("text", {"type": "string"}),
    bool: ("flag", {"type": "boolean"}),
    Any: ("any", {}),
}


class Schema:
    """Types as the page writes them and as JSON Schema has them; ``objects`` are the classes met on the way, by name."""

    def __init__(self) -> None:
        self.objects: dict[str, type] = {}

    def of(self, shape: Any) -> tuple[str, dict[str, Any]]:
        """(as the page writes it, as JSON Schema). Raises TypeError for a type that no document holds."""
        if shape in SIMPLE:
            return SIMPLE[shape]
        origin, args = typing.get_origin(shape), typing.get_args(shape)
        if origin is Literal:
            return "text", {"type": "string", "enum": list(args)}
        if origin in (Union, UnionType):
            options = [self.of(arg) for arg in args if arg is not NoneType]
            null = [{"type": "null"}] if NoneType in args else []
            text = " or ".join(text for text, _ in options)
            ending = "" if not null else "?" if len(options) == 1 else " or null"
            return text + ending, {"anyOf": [schema for _, schema in options] + null}
        if origin in (list, tuple) and (origin is list or args[1:] == (...,)):
            text, schema = self.of(args[0])
            return f"[{text}]", {"type": "array", "items": schema}
        if isinstance(origin, type) and issubclass(origin, typing.Mapping) and args[0] is str:
            text, schema = self.of(args[1])
            return f"{{{text}}}", {"type": "object", "additionalProperties": schema}
        fields_of(shape)  # raises for a class that describes no key
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", shape.__name__).lower()
        if self.objects.setdefault(name, shape) is not shape:
            raise TypeError(f"{shape} and {self.objects[name]} are both called {name!r}. Rename one of them.")
        return name, {"$ref": f"#/$defs/{name}"}

    def all_objects(self, kinds: typing.Iterable[dict[str, Field]]) -> dict[str, type]:
        """Every class that the documents hold, in the order in which they are met."""
        for field in (field for fields in kinds for field in fields.values()):
            self.of(field.shape)
        done = 0
        while done < len(self.objects):
            for cls in list(self.objects.values())[done:]:
                done += 1
                for field in fields_of(cls).values():
                    self.of(field.shape)
        return self.objects


def summary(cls: type) -> str:
    """The first sentence of the class's docstring."""
    paragraph = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    return re.sub(r"``(.+?)``", r"`\1`", re.split(r"(?<=\.)\s", paragraph)[0])


def object_schema(schema: Schema, fields: dict[str, Field], text: str) -> dict[str, Any]:
    """An object with these keys and no others."""
    properties = {
        name: {**schema.of(field.shape)[1], "description": field.text} | ({"unit": field.unit} if field.unit else {})
        for name, field in fields.items()
    }
    return {
        "type": "object",
        "description": text,
        "properties": properties,
        "required": [name for name, field in fields.items() if field.required],
        "additionalProperties": False,
    }


def json_schema() -> dict[str, Any]:
    """One schema for all plans: a document is one of the five kinds."""
    schema, kinds = Schema(), {kind: document_fields(kind) for kind in DOCUMENTS}
    documents = {
        f"plan_{kind}": object_schema(schema, fields, f"twostroke plan {kind} --json") for kind, fields in kinds.items()
    }
    for name, document in documents.items():
        document["properties"]["kind"] = {"const": name.removeprefix("plan_")}
        document["properties"]["schema"] = {"const": PLAN_SCHEMA}
    objects = schema.all_objects(kinds.values())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": PLAN_SCHEMA,
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in documents],
        "$defs": documents | {name: object_schema(schema, fields_of(cls), summary(cls)) for name, cls in objects.items()},
    }


HEAD = f"""# Plan documents

What `twostroke plan … --json` prints. Generated by `docs/generate.py` from the annotations of the planner's own classes; a test
validates real documents of every kind against it and fails for a key that is not described. `plan-schema.json` is the same as
JSON Schema.

Every document carries `"schema": "{PLAN_SCHEMA}"`. The number rises when a key is removed or changes its meaning; keys may be
added under the same number, so readers must ignore keys that they do not know. An error is `{{"error": "a sentence"}}` and exit
code 2.

Types: number, integer, text, flag, or the name of an object below; `[x]` is a list of x, `{{x}}` a table of x under free names,
`x?` may be null. A key that ends in `?` may be absent. Units are in the keys' names or beside them; GB is 10⁹ bytes.
"""


def markdown() -> str:
    """``docs/plan-schema.md``."""
    schema, kinds = Schema(), {kind: document_fields(kind) for kind in DOCUMENTS}

    def table(fields: dict[str, Field]) -> str:
        rows = (f"| `{k}{'' if f.required else '?'}` | {schema.of(f.shape)[0]} | {f.text} |" for k, f in fields.items())
        return "\n".join(["| key | type | meaning |", "|---|---|---|", *rows])

    common = fields_of(Common)
    parts = [HEAD, "## In every document\n", table(common)]
    for kind, fields in kinds.items():
        parts += [f"\n## `plan {kind}`\n", table({k: f for k, f in fields.items() if k not in common})]
    parts.append("\n## Objects")
    for name, cls in schema.all_objects(kinds.values()).items():
        parts += [f"\n### {name}\n\n{summary(cls)}\n", table(fields_of(cls))]
    return "\n".join(parts) + "\n"
