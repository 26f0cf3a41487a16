"""What a chapter opens with: parameters, and the sentence that a wrong one gets."""

import pytest

from specsel.paper.chapter import ParameterError, checked, given


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("arms", '["a", "b"]', ["a", "b"]),
        ("arms", "a, b", ["a", "b"]),
        ("arms", ("a", "b"), ["a", "b"]),
        ("arms", ["a:b"], ["a:b"]),
        ("thresholds", "0.2,0.1", [0.2, 0.1]),
        ("level", "1e-2", 0.01),
        ("n_resamples", "200", 200),
        ("threshold", "None", None),
        ("threshold", None, None),
        ("tuned", "False", False),
    ],
)
def test_values_arrive_as_papermill_passes_them(name, value, wanted):
    assert getattr(checked({name: value}), name) == wanted


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("n_resamples", "no", "valid integer"),
        ("n_resamples", 0, "greater than or equal to 1"),
        ("n_resamples", True, "valid integer"),
        ("seed", 0.01, "valid integer"),
        ("seed", -1, "greater than or equal to 0"),
        ("seed", "2024-01-02", "valid integer"),
        ("level", 1.5, "less than 1"),
        ("threshold", "NaN", "less than or equal to 1"),
        ("rho", "cheap", "valid number"),
        ("run", 5, "valid string"),
        ("arms", "[]", "at least 1 item"),
        ("arms", "[1, 2]", "valid string"),
        ("arms", ["a", "a"], "different"),
        ("thresholds", [0.1, 2], "less than or equal to 1"),
        ("features", "colour", "'conf_mean', "),
        ("tuned", "perhaps", "valid boolean"),
    ],
)
def test_a_wrong_value_gets_one_sentence(name, value, allowed):
    with pytest.raises(ParameterError) as error:
        checked({name: value})
    said = str(error.value)
    assert said.startswith(f"parameter '{name}' is {value!r}: ") and allowed in said and "\n" not in said


def test_an_unknown_name_is_refused_with_the_nearest_one_and_results_are_no_parameters():
    names = {"rnu": "x", "_": 1, "In": [], "log": object(), "helper": len}
    with pytest.raises(ParameterError, match="'rnu' is no parameter of demo; did you mean 'run'"):
        given("demo", names)
    assert given("demo", {"run": "x", "log": object()}) == {"run": "x"}
    assert given("demo", {"run": "x", "a_result": 0.5}) == {"run": "x"}, "the kernel has opened this chapter before"
