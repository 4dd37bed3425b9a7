"""Some hundred mutations of the examples, and every input that was once not answered. `fuzz.py` runs many more."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import TEXTS, Input, Source, judged
from fuzz_answer import SEEDS, TooLong, Wrong, answer, at_most, workplace


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workplace(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("first", range(0, 300, 75))
def test_mutations_are_answered(first: int, place: Path) -> None:
    source = Source(seed=0)
    for number in range(first, first + 75):
        made = source.input(number)
        _, wrong = judged(place, made)
        assert not wrong, f"input {number} with {made.overrides}:\n{made.raw.decode('utf-8', 'replace')}\n{wrong}"


@pytest.mark.parametrize("name", sorted(path.name for path in SEEDS.glob("*.rlflow")))
def test_what_was_once_wrong_is_answered(name: str, place: Path) -> None:
    _, wrong = judged(place, Input("kept", (SEEDS / name).read_bytes()))
    assert not wrong


def test_inputs_depend_on_their_number_only() -> None:
    assert Source(3).input(17) == Source(3).input(17)
    assert Source(3).input(17) != Source(4).input(17)


def test_what_is_not_mutated_is_sound(place: Path) -> None:
    """Otherwise the mutations would only show that the folder is wrong."""
    for text in TEXTS[:-1]:
        assert answer(place, text.encode()) == "sound"


def test_a_wrong_answer_is_noticed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlflow import driver

    def raises(*_: object) -> None:
        raise RuntimeError("oh")

    def hangs(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(driver, "check", raises)
    assert "RuntimeError: oh" in judged(place, Input("kept", b""))[1]
    monkeypatch.setattr(driver, "check", hangs)
    with pytest.raises(TooLong), at_most(0.05):
        answer(place, b"")
    assert issubclass(Wrong, Exception)
