"""What a chapter opens with: parameters, and the sentence that a wrong one gets."""

import pytest

from specsel.paper.chapter import ParameterError, checked, given


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("arms", '["a", "b"]', ("a", "b")),
        ("arms", "a, b", ("a", "b")),
        ("arms", ["a:b"], ("a:b",)),
        ("thresholds", "0.2,0.1", (0.1, 0.2)),
        ("level", "1e-2", 0.01),
        ("n_resamples", 200.0, 200),
        ("threshold", None, None),
        ("tuned", "False", False),
    ],
)
def test_values_arrive_as_papermill_passes_them(name, value, wanted):
    assert getattr(checked({name: value}), name) == wanted


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("n_resamples", "no", "whole number, 1 or more"),
        ("n_resamples", 0, "whole number, 1 or more"),
        ("n_resamples", True, "whole number"),
        ("seed", 0.01, "whole number, 0 or more"),
        ("seed", -1, "whole number, 0 or more"),
        ("seed", "2024-01-02", "whole number"),
        ("level", 1.5, "above 0 and below 1"),
        ("threshold", "nan", "between 0 and 1"),
        ("rho", "cheap", "a number, 0 or more"),
        ("run", 5, "a name or path"),
        ("arms", "[]", "at least one"),
        ("arms", "[1, 2]", "different names"),
        ("arms", ["a", "a"], "different names"),
        ("thresholds", [0.1, 2], "between 0 and 1"),
        ("features", "colour", "conf_mean"),
    ],
)
def test_a_wrong_value_gets_one_sentence(name, value, allowed):
    with pytest.raises(ParameterError, match=f"parameter '{name}' is .*; expected .*{allowed}") as error:
        checked({name: value})
    assert "\n" not in str(error.value)


def test_an_unknown_name_is_refused_with_the_nearest_one_and_results_are_no_parameters():
    names = {"rnu": "x", "_": 1, "In": [], "log": object(), "helper": len}
    with pytest.raises(ParameterError, match="'rnu' is no parameter of demo; did you mean 'run'"):
        given("demo", names)
    assert given("demo", {"run": "x", "log": object()}) == {"run": "x"}
    assert given("demo", {"run": "x", "a_result": 0.5}) == {"run": "x"}, "the kernel has opened this chapter before"
