"""``[zephon]`` tables: what is refused and in which words, and the arithmetic of weights."""

import dataclasses
from typing import Any

import pytest

from torchtitan_zephon.recipe import (
    DatasetConfig,
    RecipeError,
    ShuffleConfig,
    auto_lanes,
    differences,
    digest_json,
    integer_weights,
    parse_recipe,
)

DIGEST = "1e02bc81a26af2f027329541e97eef36f3290bedc6dfe043dbe66b057ecb13ba"
WEB = {"name": "web", "path": "data/web"}
BOOKS = {"name": "books", "path": "data/books"}


def parse(table: dict[str, Any], seq_len: int = 8, tokenizer_path: str | None = "tokenizer"):
    return parse_recipe(table, seq_len=seq_len, tokenizer_path=tokenizer_path)


def faults_of(table: dict[str, Any], **given: Any) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse(table, **given)
    return caught.value.faults


def weights(*values: float) -> list[int]:
    return integer_weights(values)


def test_the_smallest_recipe_is_one_dataset_and_has_documented_defaults():
    recipe = parse({"datasets": [WEB]})
    assert recipe.datasets == (DatasetConfig(name="web", path="data/web", weight=1.0),)
    assert (recipe.seq_len, recipe.seed, recipe.lanes, recipe.passes) == (8, 0, "auto", 0)
    assert recipe.tokenizer.path == "tokenizer"
    assert recipe.packing.algorithm == "wrap"
    assert recipe.shuffle == ShuffleConfig(buffer_size=1000, order="random")
    assert recipe.resume.on_recipe_change == "refuse"


def test_the_tables_own_tokenizer_wins_over_hf_assets_path():
    recipe = parse({"datasets": [WEB], "tokenizer": {"path": "mine"}}, tokenizer_path="theirs")
    assert recipe.tokenizer.path == "mine"


def test_no_dataset_is_a_fault():
    assert faults_of({}) == ["zephon.datasets: at least one [[zephon.datasets]] table is needed"]


def test_weights_that_are_no_share_are_all_refused_in_one_message():
    values = {"zero": 0, "minus": -1.5, "nan": float("nan"), "inf": float("inf")}
    with pytest.raises(RecipeError) as caught:
        parse({"datasets": [{"name": n, "path": "p", "weight": w} for n, w in values.items()]})
    assert str(caught.value) == (
        "4 faults in the recipe:\n"
        "  zephon.datasets[zero].weight = 0.0: must be a finite number above 0\n"
        "  zephon.datasets[minus].weight = -1.5: must be a finite number above 0\n"
        "  zephon.datasets[nan].weight = nan: must be a finite number above 0\n"
        "  zephon.datasets[inf].weight = inf: must be a finite number above 0"
    )


def test_weights_too_far_apart_for_exact_comparison_are_refused():
    (fault,) = faults_of({"datasets": [WEB, {**BOOKS, "weight": 1e-13}]})
    assert fault.startswith("zephon.datasets: weights [1.0, 1e-13] differ too much")


def test_two_datasets_of_one_name_are_refused():
    validation = {"datasets": [BOOKS, BOOKS, BOOKS]}
    assert faults_of({"datasets": [WEB, BOOKS, WEB], "validation": validation}) == [
        "zephon.datasets: 2 datasets are named 'web'",
        "zephon.validation.datasets: 3 datasets are named 'books'",
    ]


def test_a_dataset_may_serve_both_training_and_validation():
    recipe = parse({"datasets": [WEB], "validation": {"datasets": [WEB]}})
    assert recipe.validation.datasets == recipe.datasets


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ({"lanes": 0}, "zephon.lanes = 0: must be 'auto' or from 1 to 4096"),
        ({"lanes": 4097}, "zephon.lanes = 4097: must be 'auto' or from 1 to 4096"),
        ({"lanes": True}, "zephon.lanes = True: Expected int | str, got bool"),
        ({"lanes": 2.5}, "zephon.lanes = 2.5: Expected int | str, got float"),
        ({"seed": -1}, "zephon.seed = -1: must be from 0 to 2**63-1"),
        ({"seed": True}, "zephon.seed = True: Expected int, got bool"),
        ({"runtim": {}}, "zephon.runtim: no such setting; did you mean 'runtime'?"),
        ({"packing": []}, "zephon.packing = []: expected a table, [zephon.packing]"),
        ({"packing": {"open_bins": 0}}, "zephon.packing.open_bins = 0: must be from 1 to 1024"),
        (
            {"shuffle": {"buffer_size": -1}},
            "zephon.shuffle.buffer_size = -1: must be 0 or more",
        ),
        (
            {"shuffle": {"bufer_size": 9}},
            "zephon.shuffle.bufer_size: no such setting; did you mean 'buffer_size'?",
        ),
        (
            {"shuffle": {"buffer_size": "1k"}},
            "zephon.shuffle.buffer_size = '1k': Expected int, got str",
        ),
        ({"runtime": {"threads": 0}}, "zephon.runtime.threads = 0: must be from 1 to 256"),
        (
            {"runtime": {"prefetch_steps": 0}},
            "zephon.runtime.prefetch_steps = 0: must be from 1 to 1024",
        ),
        ({"passes": -2}, "zephon.passes = -2: must be 0 or more"),
        ({"seq_len": 8}, "zephon.seq_len: no such setting; it is training.seq_len"),
        (
            {"on_exhausted": "halt"},
            "zephon.on_exhausted = 'halt': known here: drop, repeat, stop",
        ),
        (
            {"phases": [{"from_tokens": 5, "weights": {"wbe": 1}}]},
            "zephon.phases[0].weights.wbe: no such dataset; did you mean 'web'?",
        ),
        (
            {"phases": [{"from_tokens": 5, "weights": {"web": 0}}]},
            "zephon.phases[0].weights.web = 0.0: must be a finite number above 0",
        ),
        (
            {"phases": [{"from_tokens": t, "weights": {"web": 1}} for t in (5, 5)]},
            "zephon.phases[1].from_tokens = 5: must be above the one before",
        ),
        (
            {"operators": [{"kind": "map", "function": "a:b", "datasets": ["wbe"]}]},
            "zephon.operators[0].datasets: no dataset 'wbe'; did you mean 'web'?",
        ),
        (
            {"operators": [{"kind": "mop", "function": "a:b"}]},
            "zephon.operators[0].kind = 'mop': did you mean 'map'?",
        ),
        (
            {"packing": {"long_documents": "drop"}},
            "zephon.packing.long_documents = 'drop': wrap splits documents",
        ),
        (
            {"packing": {"max_documents": 3}},
            "zephon.packing.max_documents = 3: not with algorithm = 'wrap', which fills every row",
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_its_full_name(table, fault):
    assert faults_of({"datasets": [WEB], **table}) == [fault]


@pytest.mark.parametrize(
    ("dataset", "fault"),
    [
        ({"path": "p"}, "zephon.datasets[0].name: missing"),
        ({"name": "web"}, "zephon.datasets[web].path: missing"),
        ({"name": "", "path": "p"}, "zephon.datasets[].name: must not be empty"),
        ({"name": "web", "path": ""}, "zephon.datasets[web].path: must not be empty"),
        ({**WEB, "weight": "1"}, "zephon.datasets[web].weight = '1': Expected float, got str"),
        (
            {**WEB, "weigth": 1},
            "zephon.datasets[web].weigth: no such setting; did you mean 'weight'?",
        ),
        ("web", "zephon.datasets[0] = 'web': expected a table, [zephon.datasets[0]]"),
    ],
)
def test_a_wrong_setting_of_a_dataset_is_refused_by_its_full_name(dataset, fault):
    assert fault in faults_of({"datasets": [dataset]})


def test_a_choice_that_does_not_exist_is_told_the_choices():
    (fault,) = faults_of({"datasets": [WEB], "packing": {"algorithm": "fist_fit"}})
    assert fault.startswith("zephon.packing.algorithm = 'fist_fit': ")
    assert "'first_fit'" in fault


def test_seq_len_is_blamed_on_torchtitans_setting():
    assert faults_of({"datasets": [WEB]}, seq_len=0) == [
        "zephon.seq_len = 0: training.seq_len must be 1 or more"
    ]


def test_faults_of_types_names_and_values_come_in_one_message():
    table = {
        "datasets": [{**WEB, "weight": 0}, {**WEB, "weigth": 2}, {**BOOKS, "weight": "1"}],
        "lanes": 0,
        "seed": "7",
        "packing": {"open_bins": 0, "algoritm": "wrap"},
        "runtime": {"threads": 1.5},
    }
    faults = faults_of(table)
    for start in (
        "zephon.datasets[web].weight = 0.0",
        "zephon.datasets[web].weigth: no such setting",
        "zephon.datasets[books].weight = '1'",
        "zephon.datasets: 2 datasets are named 'web'",
        "zephon.lanes = 0",
        "zephon.seed = '7'",
        "zephon.packing.open_bins = 0",
        "zephon.packing.algoritm: no such setting",
        "zephon.runtime.threads = 1.5",
    ):
        assert [start] == [start for f in faults if f.startswith(start)], faults
    assert len(faults) == 9


def test_integer_weights_are_the_smallest_integers_in_the_same_ratio():
    assert weights(0.7, 0.2, 0.1) == [7, 2, 1]
    assert weights(3) == [1]
    assert weights(1, 2.5) == [2, 5]
    assert weights(1 / 3, 1 / 3, 1 / 3) == [1, 1, 1]
    assert weights(1 / 3, 2 / 3) == [333333333, 666666667]
    assert weights(0.1 + 0.2, 0.3) == [1, 1]
    assert weights(0.123456789, 1) == [123456789, 1000000000]
    assert weights(1e300, 2e300) == [1, 2]
    assert weights(1e9, 1) == [1000000000, 1]


def test_auto_lanes_is_the_largest_divisor_of_the_global_batch_up_to_64():
    expected = {1: 1, 2: 2, 12: 12, 61: 61, 64: 64, 67: 1, 96: 48, 128: 64, 1000: 50, 4096: 64}
    assert {batch: auto_lanes(batch) for batch in expected} == expected


def test_validation_is_one_unshuffled_pass_in_one_lane():
    recipe = parse({"datasets": [WEB], "lanes": 8, "validation": {"datasets": [BOOKS]}})
    validation = recipe.for_validation()
    assert [d.name for d in validation.datasets] == ["books"]
    assert (validation.lanes, validation.passes) == (1, 1)
    assert validation.shuffle == ShuffleConfig(buffer_size=0, order="sequential")
    assert not validation.audit.enable
    assert (validation.seq_len, validation.tokenizer) == (recipe.seq_len, recipe.tokenizer)


def test_differences_name_each_field_with_both_values():
    old = {"a": 1, "b": {"c": 2, "d": [1]}, "x": 0}
    new = {"a": 1, "b": {"c": 3, "d": [1, 2]}, "y": "é"}
    assert list(differences(old, new)) == [
        "b.c: 2 -> 3",
        "b.d: [1] -> [1, 2]",
        "x: 0 -> not there",
        'y: not there -> "é"',
    ]
    assert list(differences(old, old)) == []
    assert list(differences({"a": {"b": 1}}, {"a": 2})) == ['a: {"b": 1} -> 2']


def test_differences_cut_long_values():
    assert list(differences({"a": "x" * 200}, {"a": ""})) == ['a: "' + "x" * 116 + '... -> ""']


def test_digest_json_ignores_the_order_of_keys_only():
    # printf '{"a":[1,"é"],"b":null}' | sha256sum
    assert digest_json({"b": None, "a": [1, "é"]}) == digest_json({"a": [1, "é"], "b": None})
    assert digest_json({"a": [1, "é"], "b": None}) == DIGEST
    assert digest_json({"a": ["é", 1], "b": None}) != DIGEST


def test_a_recipe_cannot_be_changed_in_place():
    recipe = parse({"datasets": [WEB]})
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.seed = 1  # pyrefly: ignore[read-only]


def test_token_ids_come_in_the_place_of_a_text_and_not_with_chats():
    ids = {**WEB, "tokens_field": "input_ids"}
    assert parse({"datasets": [ids]}).datasets[0].tokens_field == "input_ids"
    assert faults_of({"datasets": [{**ids, "text_field": "body"}], "chat": {}}) == [
        "zephon.datasets[web].text_field: not with tokens_field, which is read in its place",
        "zephon.datasets[web].tokens_field: not with chat, which reads messages",
    ]
