"""`dataclass` for frozen values, made in a third of the time: a command line creates some 150 of them before it starts.

The decorator of the standard library compiles six functions for each frozen class. Here only `__init__` is compiled;
the others are shared by all classes. What it makes is a dataclass in every way: `fields`, `replace`, `asdict`,
`match`, pickling and copying work. Whatever this module does not know goes to the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from dataclasses import dataclass as _standard
from inspect import get_annotations
from operator import attrgetter
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

_OWN = ("__init__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__getstate__", "__setstate__")
"""A class that defines one of these itself is left to the standard library."""


class _Factory:
    """Stands for "not given" where a field has a default factory."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _decorate(
    cls: type[T] | None = None, /, *, frozen: bool = False, slots: bool = False, kw_only: bool = False, **others: Any
) -> Any:
    def wrap(cls: type[T]) -> type[T]:
        if frozen and not others and _is_known(cls):
            return _frozen(cls, slots, kw_only)
        return _standard(frozen=frozen, slots=slots, kw_only=kw_only, **others)(cls)

    return wrap if cls is None else wrap(cls)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _decorate


def _is_known(cls: type) -> bool:
    """Whether the class is of the kind made here: annotations are text, and dataclasses above it are frozen."""
    kinds = get_annotations(cls)
    plain = all(isinstance(kind, str) and "InitVar" not in kind and "KW_ONLY" not in kind for kind in kinds.values())
    return (
        plain
        and "self" not in kinds
        and not any(name in cls.__dict__ for name in _OWN)
        and all(params.frozen for params in _params_above(cls))
    )


def _params_above(cls: type) -> list[Any]:
    """The parameters of the dataclasses that a class inherits from."""
    name = "__dataclass_params__"
    return [base.__dict__[name] for base in cls.__mro__[1:] if name in base.__dict__]


def _frozen(cls: type[T], slots: bool, kw_only: bool) -> type[T]:
    if not cls.__doc__:  # the standard one asks inspect, which takes long
        kinds = get_annotations(cls)
        cls.__doc__ = f"{cls.__name__}({', '.join(f'{name}: {kind}' for name, kind in kinds.items())})"
    above = _params_above(cls)
    for params in above:  # to the standard decorator, which is to make no methods, this class is none that is frozen
        params.frozen = False
    try:
        made: Any = _standard(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(cls)
    finally:
        for params in above:
            params.frozen = True
    for name in ("frozen", "init", "repr", "eq"):
        setattr(made.__dataclass_params__, name, True)
    held = fields(made)
    made.__init__ = _init(made, held)
    if "__repr__" not in cls.__dict__:
        made.__repr__ = _repr(tuple(f.name for f in held if f.repr))
    made.__eq__ = _eq(_key(tuple(f.name for f in held if f.compare)))
    made.__hash__ = _hash(_key(tuple(f.name for f in held if (f.compare if f.hash is None else f.hash))))
    names = frozenset(f.name for f in held)
    made.__setattr__ = _setattr(made, names)
    made.__delattr__ = _delattr(made, names)
    if slots:
        made.__getstate__ = _getstate
        made.__setstate__ = _setstate
    for method in ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__"):
        function = made.__dict__[method]
        function.__qualname__ = f"{made.__qualname__}.{method}"
        function.__module__ = made.__module__
    return made  # type: ignore[no-any-return]


# --- the methods ------------------------------------------------------------------------------------------------------


def _init(cls: type, held: tuple[Field[Any], ...]) -> Callable[..., None]:
    """`__init__`, which sets the slots through their descriptors: the shortest way past `__setattr__`."""
    scope: dict[str, Any] = {"_factory": _FACTORY, "_set": object.__setattr__}
    positional: list[str] = []
    named: list[str] = []
    body: list[str] = []
    optional = False
    for f in held:
        name = f.name
        has_default, has_factory = f.default is not MISSING, f.default_factory is not MISSING
        scope[f"_default_{name}"] = f.default_factory if has_factory else f.default
        value = name
        slot = _slot(cls, name)
        if f.init:
            default = f" = _default_{name}" if has_default else " = _factory" if has_factory else ""
            if not f.kw_only and optional and not default:
                raise TypeError(f"non-default argument {name!r} follows default argument")
            optional |= bool(default) and not f.kw_only
            (named if f.kw_only else positional).append(name + default)
            if has_factory:
                value = f"_default_{name}() if {name} is _factory else {name}"
        elif has_factory:
            value = f"_default_{name}()"
        elif slot is not None and has_default:
            value = f"_default_{name}"
        else:
            continue
        if slot is not None:
            scope[f"_set_{name}"] = slot.__set__
            body.append(f"_set_{name}(self, {value})")
        else:
            body.append(f"_set(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    arguments = ["self", *positional, *(["*", *named] if named else [])]
    exec(f"def __init__({', '.join(arguments)}):\n " + ("\n ".join(body) or "pass"), scope)
    init: Callable[..., None] = scope["__init__"]
    init.__annotations__ = {**{f.name: f.type for f in held if f.init}, "return": None}
    return init


def _slot(cls: type, name: str) -> Any:
    """The descriptor of a field that has a slot, or None."""
    found = next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)
    return found if isinstance(found, MemberDescriptorType) else None


def _key(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """The values of some fields as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    if not names:
        return lambda value: ()
    (name,) = names
    return lambda value: (getattr(value, name),)


def _repr(names: tuple[str, ...]) -> Callable[[Any], str]:
    def __repr__(self: Any) -> str:
        return f"{self.__class__.__qualname__}({', '.join([f'{name}={getattr(self, name)!r}' for name in names])})"

    return __repr__


def _eq(key: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, object], Any]:
    def __eq__(self: Any, other: object) -> Any:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(key: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:
        return hash(key(self))

    return __hash__


def _setattr(cls: type[Any], names: frozenset[str]) -> Callable[[Any, str, Any], None]:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    return __setattr__


def _delattr(cls: type[Any], names: frozenset[str]) -> Callable[[Any, str], None]:
    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return __delattr__


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for f, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, f.name, value)
