"""Reading tables into dataclasses: each fault gets a line, with the setting's full name."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan_zephon.settings import nearest, read_table


@dataclass(frozen=True, kw_only=True)
class Wheel:
    name: str
    size: float = 1.0

    def faults(self) -> Iterator[str]:
        if self.size <= 0:
            yield f"size = {self.size}: must be above 0"


@dataclass(frozen=True, kw_only=True)
class Engine:
    kind: Literal["steam", "diesel"] = "steam"


@dataclass(frozen=True, kw_only=True)
class Car:
    seats: int
    wheels: tuple[Wheel, ...] = ()
    engine: Engine = field(default_factory=Engine)
    open: bool = False

    def faults(self) -> Iterator[str]:
        if self.seats < 1:
            yield f"seats = {self.seats}: must be 1 or more"


def faults_of(table: Any) -> list[str]:
    faults: list[str] = []
    read_table(Car, table, "car", faults)
    return faults


def test_a_right_table_becomes_the_dataclass_with_its_nested_tables():
    faults: list[str] = []
    table = {"seats": 2, "wheels": [{"name": "a", "size": 3}], "engine": {"kind": "diesel"}}
    assert read_table(Car, table, "car", faults) == Car(
        seats=2, wheels=(Wheel(name="a", size=3.0),), engine=Engine(kind="diesel")
    )
    assert faults == []


def test_an_integer_may_stand_for_a_float_and_becomes_one():
    wheel = read_table(Wheel, {"name": "a", "size": 3}, "wheel", [])
    assert wheel is not None
    assert isinstance(wheel.size, float)


def test_a_misspelt_setting_is_told_the_nearest_right_one():
    assert faults_of({"seats": 1, "engin": {}}) == [
        "car.engin: no such setting; did you mean 'engine'?"
    ]


def test_a_setting_that_resembles_nothing_is_told_all_there_are():
    assert faults_of({"seats": 1, "xyz": 1}) == [
        "car.xyz: no such setting; known here: engine, open, seats, wheels"
    ]
    assert nearest("qqq", {"b": 1, "a": 2}) == "known here: a, b"


def test_a_missing_setting_without_default_is_named():
    assert faults_of({}) == ["car.seats: missing"]


def test_a_value_of_another_type_is_named_with_both_types():
    assert faults_of({"seats": "2"}) == ["car.seats = '2': Expected int, got str"]
    assert faults_of({"seats": 2.0}) == ["car.seats = 2.0: Expected int, got float"]
    assert faults_of({"seats": True}) == ["car.seats = True: Expected int, got bool"]
    assert faults_of({"seats": 1, "open": 1}) == ["car.open = 1: Expected bool, got int"]


def test_a_table_where_another_thing_stands_is_asked_for_in_toml_words():
    assert faults_of([]) == ["car = []: expected a table, [car]"]
    assert faults_of({"seats": 1, "engine": 3}) == [
        "car.engine = 3: expected a table, [car.engine]"
    ]
    assert faults_of({"seats": 1, "wheels": {"name": "a"}}) == [
        "car.wheels = {'name': 'a'}: expected an array of tables, [[car.wheels]]"
    ]


def test_a_table_of_an_array_is_named_by_its_name_or_else_its_number():
    assert faults_of({"seats": 1, "wheels": [{"name": "left", "siz": 1}, {"size": 1}, 4]}) == [
        "car.wheels[left].siz: no such setting; did you mean 'size'?",
        "car.wheels[1].name: missing",
        "car.wheels[2] = 4: expected a table, [car.wheels[2]]",
    ]


def test_a_value_that_is_none_of_the_choices_is_told_the_choices():
    (fault,) = faults_of({"seats": 1, "engine": {"kind": "deisel"}})
    assert fault.startswith("car.engine.kind = 'deisel': ")
    assert "'diesel'" in fault


def test_every_fault_of_every_table_is_reported_at_once():
    table = {
        "seats": 0,
        "opne": True,
        "wheels": [{"name": "left", "size": 0, "siz": 1}, {"name": "right", "size": -1}],
        "engine": {"kind": 3},
    }
    faults = faults_of(table)
    assert {fault.split(": ")[0] for fault in faults} == {
        "car.seats = 0",
        "car.opne",
        "car.wheels[left].size = 0.0",
        "car.wheels[left].siz",
        "car.wheels[right].size = -1.0",
        "car.engine.kind = 3",
    }
    assert len(faults) == 6
